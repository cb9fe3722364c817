"""The files and packages that a config needs on this machine, checked before anything starts."""

import importlib.util
from pathlib import Path

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.config.schema import Config
from ddp_runner.data.tokenizer import NEEDS_TEXT_EXTRA, tokenizer_file
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir

MODEL_FILE = "config.json"  # of a folder of trained weights
BERT, IMAGE_FOLDER = (
    "ddp_runner.models.bert.Bert",
    "ddp_runner.data.sources.image_folder.ImageFolder",
)

WEIGHT_FILES = (".safetensors", ".pt", ".pth")


def validate_files(config: Config, *, env: DistEnv | None = None) -> None:
    """Refuse a resolved config that names a missing file, folder or package.

    Args:
        config: resolved.
        env: this rank's facts if the ranks run already.

    Raises:
        UserError: something is missing; the message says what to write instead.
    """
    model, dataset, data_root = config.model, config.dataset, Path(config.data_root)
    if model.get("_target_") == BERT and importlib.util.find_spec("transformers") is None:
        raise UserError(f"model=bert: {NEEDS_TEXT_EXTRA}")
    if (path := dataset.get("path")) is not None and not (data_root / str(path)).is_file():
        raise UserError(
            f"dataset.path ({path}): there is no file {(data_root / str(path)).absolute()}; give a "
            "path under data_root, or an absolute one"
        )
    if dataset.get("_target_") == IMAGE_FOLDER:
        folder = data_root / str(dataset.get("folder"))
        if not folder.is_dir():
            raise UserError(
                f"dataset.folder ({dataset.get('folder')}): there is no folder "
                f"{folder.absolute()}; give one under data_root, or an absolute one"
            )
    if (name := model.get("pretrained")) is not None and not Path(str(name), MODEL_FILE).is_file():
        raise UserError(
            f"model.pretrained ({name}): there is no {MODEL_FILE} in {Path(str(name)).absolute()}; "
            "name a folder of trained weights, as transformers' save_pretrained leaves it"
        )
    if (name := dataset.get("tokenizer")) is not None:
        tokenizer_file(Path(str(name)))
    # Only rank 0 reads the weights, perhaps on another machine. A resumed run needs them no more.
    num_nodes = env.num_nodes if env else config.launch.nnodes
    if model.get("weights") is not None and config.resume is None and num_nodes == 1:
        _validate_weights(Path(str(model["weights"])))


def _validate_weights(path: Path) -> None:
    if not path.exists():
        raise UserError(f"model.weights ({path}) does not exist; {_kinds()}")
    is_checkpoint = (path / MANIFEST).exists() or RunDir(path).checkpoints.is_dir()
    if not (is_checkpoint or path.suffix in WEIGHT_FILES):
        raise UserError(f"model.weights ({path}) is not a weights file or run folder; {_kinds()}")


def _kinds() -> str:
    return (
        "give a run folder, its checkpoints/step-XXXXXXXX, or a file that ends in "
        f"{', '.join(WEIGHT_FILES)}"
    )
