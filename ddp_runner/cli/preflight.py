"""Validates the packages, files and memory that a resolved config needs. Torch-free."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.config.requires import validate_requires
from ddp_runner.config.rules import OFFLINE, validate_trackers
from ddp_runner.config.schema import Config
from ddp_runner.config.sections import SAMPLE
from ddp_runner.data.tokenizer import tokenizer_file
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import memory_bytes
from ddp_runner.tracking.run_dir import RunDir

MODEL_FILE = "config.json"  # in a folder of transformers' weights
SMALL_BYTES = 2**26  # a dataset of this size fits into any memory
WEIGHT_FILES = (".safetensors", ".pt", ".pth")


def validate_files(config: Config, *, env: DistEnv | None = None, is_here: bool = True) -> None:
    """Reject a resolved config that needs a missing file, folder or package, or more memory.

    `env` holds this rank's facts if the ranks run already. Without `is_here` this machine only
    submits the job, and its memory does not matter.
    """
    model, dataset = config.model, config.dataset
    validate_requires(config)
    validate_trackers(config)
    if is_here:
        _validate_memory(dataset)
    if (name := model.get("pretrained")) is not None and not Path(str(name), MODEL_FILE).is_file():
        raise UserError(
            f"model.pretrained ({name}): there is no {MODEL_FILE} in {Path(str(name)).absolute()}",
            "name a folder that transformers' save_pretrained has written",
        )
    if config.task != SAMPLE and (name := dataset.get("tokenizer")) is not None:
        tokenizer_file(Path(str(name)))
    # Only rank 0 reads the weights, perhaps on another machine. A resumed run does not need them.
    num_nodes = env.num_nodes if env else config.launch.nnodes
    if (name := model.get("weights")) is not None and config.resume is None and num_nodes == 1:
        weights = Path(str(name))
        run = RunDir(weights)
        parts = (run.checkpoints, run.export, weights / MANIFEST)
        is_right = any(part.exists() for part in parts) or weights.suffix in WEIGHT_FILES
        if not (weights.exists() and is_right):
            fault = "is not a weights file or run folder" if weights.exists() else "does not exist"
            raise UserError(
                f"model.weights ({weights}) {fault}",
                "give a run folder, its "
                f"checkpoints/step-XXXXXXXX, or a file that ends in {', '.join(WEIGHT_FILES)}",
            )


def _validate_memory(dataset: Mapping[str, Any]) -> None:
    """Reject a generated dataset that is larger than this machine's memory."""
    sizes = {key: size for key, size in dataset.items() if isinstance(size, int)}
    if not str(dataset["_target_"]).startswith(OFFLINE):
        return
    if sizes.keys() >= {"channels", "height", "width"}:
        sample_bytes = math.prod(sizes[key] for key in ("channels", "height", "width"))
    else:
        sample_bytes = 4 * (sizes.get("input_size", 0) + sizes.get("target_size", 0))
    count = sizes.get("num_samples", 0) + sizes.get("eval_samples", 0)
    if count * sample_bytes < SMALL_BYTES:
        return  # each job of a sweep would measure the memory again
    needed, memory = (size / 2**30 for size in (count * sample_bytes, memory_bytes()))
    if needed > memory:
        raise UserError(
            f"dataset={dataset.get('name')} of {count} samples takes {needed:.0f} GiB and this "
            f"machine has {memory:.0f}",
            "write a smaller dataset.num_samples",
        )
