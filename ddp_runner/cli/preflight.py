"""What a resolved config needs on this machine before anything starts: files and packages.

Torch-free.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.config.allowed_targets import foreign_targets, package_of
from ddp_runner.config.inference import SAMPLE
from ddp_runner.config.schema import Config, leaves
from ddp_runner.config.tracking import MODULES, validate_servers
from ddp_runner.data.tokenizer import tokenizer_file
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir

MODEL_FILE = "config.json"  # of a folder of trained weights
BERT = "ddp_runner.models.bert.Bert"
SOURCES = "ddp_runner.data.sources"
HF_DATASET = f"{SOURCES}.hf_dataset.HFDataset"
TEXT = f"{SOURCES}.text.Text"
WEIGHT_FILES = (".safetensors", ".pt", ".pth")


def validate_files(config: Config, *, env: DistEnv | None = None) -> None:
    """Reject a resolved config that names a missing file, folder or package.

    `env` holds this rank's facts if the ranks run already.

    Raises:
        UserError: something is missing; the message says what to write instead.
    """
    model, data_root = config.model, Path(config.data_root)
    dataset = config.dataset if config.task != SAMPLE else {}  # which needs the run's folder alone
    for key, package, extra in _needed_packages(config, dataset):
        spec = importlib.util.find_spec(package)
        # A folder of that name, as W&B leaves one, is found as a package without a file.
        if spec is None or spec.origin is None:
            raise UserError(
                f"{key} needs {package}, which is not installed; pip install 'ddp-runner[{extra}]'"
            )
    # A config that may name no other code names none.
    for key, target in foreign_targets(asdict(config) if config.allowed_targets else {}).items():
        if importlib.util.find_spec(package := package_of(target)) is None:
            raise UserError(
                f"{key} ({target}) cannot be imported: there is no package {package}; install it, "
                "or start in the folder that holds it"
            )
    validate_servers(config)
    is_hf = dataset.get("_target_") == HF_DATASET  # that of an earlier run has fewer keys
    if is_hf or dataset.keys() >= {"prepare", "shuffle_buffer"}:  # a TorchDataset, or a subclass
        _validate_torch_dataset(dataset, data_root)
    else:
        _validate_paths(dataset.get("path"), data_root)
    if (name := model.get("pretrained")) is not None and not Path(str(name), MODEL_FILE).is_file():
        raise UserError(
            f"model.pretrained ({name}): there is no {MODEL_FILE} in {Path(str(name)).absolute()}; "
            "name a folder of trained weights, as transformers' save_pretrained leaves it"
        )
    if (name := dataset.get("tokenizer")) is not None:
        tokenizer_file(Path(str(name)))
    # Only rank 0 reads the weights, perhaps on another machine. A resumed run needs them no more.
    num_nodes = env.num_nodes if env else config.launch.nnodes
    if (name := model.get("weights")) is not None and config.resume is None and num_nodes == 1:
        weights = Path(str(name))
        run = RunDir(weights)
        is_run = run.checkpoints.is_dir() or run.export.exists()
        is_checkpoint = is_run or (weights / MANIFEST).exists()
        if not (weights.exists() and (is_checkpoint or weights.suffix in WEIGHT_FILES)):
            fault = "is not a weights file or run folder" if weights.exists() else "does not exist"
            raise UserError(
                f"model.weights ({weights}) {fault}; give a run folder, its "
                f"checkpoints/step-XXXXXXXX, or a file that ends in {', '.join(WEIGHT_FILES)}"
            )


def _needed_packages(config: Config, dataset: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key that needs an optional package, with the package and the name of our extra."""
    if config.model.get("_target_") == BERT:
        yield "model=bert", "transformers", "text"
    if dataset.get("_target_") == TEXT and dataset.get("vocabulary") == "bpe":
        yield "dataset.vocabulary=bpe", "tokenizers", "text"
    if dataset.get("_target_") == HF_DATASET:
        yield f"dataset={dataset.get('name')}", "datasets", "hf"
        if dataset.get("streaming"):
            yield "dataset.streaming=true", "torchdata", "streams"
    for metric, keys in config.metrics.items():
        if str(keys["_target_"]).startswith("torchmetrics."):
            yield f"metrics.{metric} ({keys['_target_']})", "torchmetrics", "metrics"
    for name, keys in config.trackers.items():
        if (module := MODULES.get(keys["_target_"])) is not None:
            yield f"trackers=[{name}]", module, module
    if config.inference.format == "parquet":
        yield "inference.format=parquet", "pyarrow", "parquet"
    if "onnx" in config.checkpoint.export:
        yield "checkpoint.export=[onnx]", "onnxscript", "onnx"


def _validate_paths(given: Any, data_root: Path) -> None:
    """Reject a file of a dataset, or a list of files, if one of them is not there."""
    for path in given if isinstance(given, list) else [given]:
        if path is not None and not (data_root / str(path)).is_file():
            raise UserError(
                f"dataset.path ({path}): there is no file {(data_root / str(path)).absolute()}; "
                "give a path under data_root, or an absolute one"
            )


def _validate_torch_dataset(dataset: Mapping[str, Any], data_root: Path) -> None:
    """Reject keys of a ``TorchDataset`` that exclude each other, and a folder that is not there."""
    if dataset["_target_"] == HF_DATASET and not isinstance(path := dataset.get("path"), str):
        raise UserError(
            f"dataset.path ({path}) must name a dataset; write a folder under data_root, a name of "
            "the hub, or dataset.path=csv with dataset.data_files"
        )
    channels, mean = dataset.get("channels"), dataset.get("mean")
    for key in ("mean", "std"):
        value = dataset.get(key)
        if isinstance(value, list) and len(value) != (channels or len(value)):
            raise UserError(
                f"dataset.{key} ({value}) must be one number, or one for each of dataset.channels "
                f"({channels})"
            )
    changes = dataset.get("augmentation")
    if changes is not None and (mean is None or not isinstance(changes, Mapping)):
        raise UserError(
            f"dataset.augmentation ({changes}) must be a mapping with a _target_, of pictures that "
            "dataset.mean and dataset.std normalise; write dataset.mean=0 dataset.std=1"
        )
    fraction, folder = dataset.get("eval_fraction"), dataset.get("folder")
    if fraction is not None and not 0 < fraction < 1:
        raise UserError(f"dataset.eval_fraction ({fraction}) must be between 0 and 1; use 0.1")
    if fraction is not None and dataset.get("eval") is not None:
        raise UserError(
            f"dataset.eval_fraction ({fraction}) is a part of dataset.train, and there is a "
            "dataset.eval; write dataset.eval=null, or leave the fraction out"
        )
    if dataset.get("prepare") and folder is None:
        raise UserError(
            "dataset.prepare=true needs dataset.folder, to prepare anew what has changed; name the "
            "folder under data_root that the samples come from"
        )
    place, keys = data_root / str(folder), dict(leaves(dataset))
    downloads = True in (keys.get("train.download"), keys.get("eval.download"))
    if folder is not None and not place.exists() and not downloads:
        raise UserError(
            f"dataset.folder ({folder}): there is no folder {place.absolute()}; give one under "
            "data_root"
        )
