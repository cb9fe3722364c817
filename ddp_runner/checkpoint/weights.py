"""The weights of a run, or of a file: what a run starts from, and what is evaluated afterwards.

Rank 0 alone finds and reads them, or a process without ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import MANIFEST, read_manifest
from ddp_runner.checkpoint.model_file import fitting_tensors, read_export
from ddp_runner.checkpoint.plain_data import load_plain_data
from ddp_runner.checkpoint.store import (
    best_checkpoints,
    checkpoints_by_step,
    first_whole,
    load_checkpoint,
    newest_first,
)
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.sections import Asked
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import file_sha256, is_missing, read_yaml
from ddp_runner.job import Status
from ddp_runner.parallelism.shards import send_module
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

TRIES = 5  # a run that goes on deletes a checkpoint while it is read
PREFIX = "module."  # of the model's names in the state of torch's AveragedModel


@dataclass(frozen=True)
class Weights:
    """A model's state_dict, and where it comes from."""

    tensors: Mapping[str, Tensor]  # on the CPU
    step: int  # optimizer steps that made it
    path: Path  # model.safetensors, the folder of a checkpoint, or a file of the user's
    is_average: bool = False  # they are those of ``ema``


def find_weights(
    run_dir: RunDir,
    asked: Asked,
    *,
    settings: CheckpointConfig,
    is_average: bool = False,
    instead: str = "inference.weights=last",
    log: Callable[[str], None],
) -> Weights:
    """Return the weights of a run.

    Args:
        run_dir: of the run.
        asked: best, last, or the step of a checkpoint; see ``InferenceConfig``.
        settings: which checkpoint is best.
        is_average: return the averaged weights of ``ema``. A loop of the user's own has none.
        instead: how to name a checkpoint, for messages.
        log: takes a sentence about each damaged checkpoint that is passed over.

    Raises:
        UserError: the run has no such weights, or they are damaged or cannot be read.
    """
    is_own = "uses" in read_run_record(run_dir, missing_ok=True)  # a loop of the user's own
    is_average = is_average and not is_own
    if asked == "best":
        found = _exported(run_dir, is_average=is_average, instead=instead, log=log)
        if found is not None:
            return found
    fix = "call run.export in its loop" if is_own else "name another run"
    for is_last_try in (*[False] * (TRIES - 1), True):
        path = find_checkpoint(run_dir.checkpoints, asked, settings=settings, log=log)
        if path is None:
            raise UserError(
                f"{run_dir} has no undamaged checkpoint, and no {run_dir.export.name} of these "
                f"weights; {fix}"
            )
        try:
            tensors = read_model(path, is_average=is_average, fix=fix)
            return Weights(tensors, read_manifest(path).step, path, is_average)
        except UserError:
            if path.exists() or is_last_try:
                raise
    raise AssertionError("the last try returns or raises")


def find_checkpoint(
    folder: Path, asked: Asked, *, settings: CheckpointConfig, log: Callable[[str], None]
) -> Path | None:
    """Return the undamaged checkpoint that is asked for; None: there is none.

    The best is by ``checkpoint.monitor``. Without one it is the newest, as it is where all with a
    finite value of that metric are damaged.

    Raises:
        UserError: the step that is asked for has no checkpoint, or the folder cannot be read.
    """
    if isinstance(asked, int):
        by_step = checkpoints_by_step(folder)
        if asked not in by_step:
            raise UserError(
                f"inference.weights ({asked}): {folder.parent} has no checkpoint of that step; it "
                f"has {', '.join(map(str, by_step)) or 'none'}"
            )
        return by_step[asked]
    ranking, monitor = list[Path](), settings.monitor
    if asked == "best" and monitor is not None:
        ranking = best_checkpoints(folder, monitor=monitor, mode=settings.mode, log=log)
    return first_whole(dict.fromkeys([*ranking, *newest_first(folder)]), log=log)


def read_model(path: Path, *, is_average: bool, fix: str) -> Mapping[str, Tensor]:
    """Return the model's state_dict in a checkpoint, averaged if so asked.

    Raises:
        UserError: the checkpoint is damaged, or has none under the name that a training gives it.
    """
    objects = load_checkpoint(path).get("objects")
    found = objects.get("ema" if is_average else "model") if isinstance(objects, Mapping) else None
    if not isinstance(found, Mapping):
        raise UserError(f"{path} holds no model; {fix}")
    return averaged_weights(found) if is_average else found


def averaged_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's state_dict that is in the state of an ``Ema``."""
    return {
        name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)
    }


def _exported(
    run_dir: RunDir, *, is_average: bool, instead: str, log: Callable[[str], None]
) -> Weights | None:
    """Return what a run has exported; None if it has trained on since, or exported another kind."""
    path = run_dir.export
    if is_missing(path):
        return None
    record = {} if is_missing(run_dir.record) else read_run_record(run_dir)
    is_completed, wanted = record.get("status") == Status.COMPLETED, record.get("export_sha256")
    with os_errors(f"{path} cannot be read", fix=f"make it readable, or write {instead}"):
        sha256 = file_sha256(path)
    if wanted is not None and sha256 != wanted and not is_completed:
        # The file is replaced before its checksum, and a kill may come in between.
        log(f"{path} is passed over: the run has not completed since it wrote the file")
        return None
    if wanted is not None and sha256 != wanted:
        raise UserError(
            f"{path} is damaged: its checksum differs from that in {run_dir.record.name}; restore "
            f"it, or write {instead}"
        )
    tensors, facts = read_export(path, named=str(path))
    step = int(facts["step"]) if facts.get("step", "").isdecimal() else 0
    later = max(checkpoints_by_step(run_dir.checkpoints), default=0)
    has_gone_on = not is_completed and later > step
    if has_gone_on or (facts.get("weights") == "ema") != is_average:
        return None
    return Weights(tensors, step, path, is_average)


def starting_weights(
    config: RunConfig, checkpoints: Path, *, log: Callable[[str], None]
) -> Weights | None:
    """Return and log what a run starts from; None: from scratch, or from its own `checkpoints`.

    ``model.weights`` names a run, whose best trained weights are taken, a folder of a checkpoint,
    or a file: ``.safetensors``, or a state_dict that torch.save wrote, by itself or under the key
    ``model`` or ``state_dict``.

    Raises:
        UserError: it names nothing that holds a model, or what could run code.
    """
    asked = config.model.get("weights")
    if asked is None or newest_first(checkpoints):
        return None
    path = Path(asked)
    what = f"model.weights ({path}) cannot be read"
    with os_errors(what, fix="make it readable, or give other weights"):
        is_run = not (path.is_file() or (path / MANIFEST).exists())
    if is_run:
        settings = _settings(RunDir(path).config)
        instead = f"model.weights={path}/checkpoints/step-XXXXXXXX"
        found = find_weights(RunDir(path), "best", settings=settings, instead=instead, log=log)
    else:
        found = Weights(_read(path), 0, path)
    log(f"starts from the weights in {found.path}")
    return found


def load_weights(module: nn.Module, found: Weights | None) -> None:
    """Load rank 0's weights, if it has some, into a bare model on all ranks. Collective.

    A mode need not send all that is in it.

    Raises:
        UserError: they are of another model.
    """
    (num_found,) = sum_over_ranks([found is not None])
    if num_found:
        tensors = None
        if found is not None:
            named = f"model.weights ({found.path})"
            tensors = fitting_tensors(module, found.tensors, named=named)
        send_module(module, tensors, group=None)


def _settings(config: Path) -> CheckpointConfig:
    """Return what a run's frozen config says of its best checkpoint, whatever its version."""
    try:
        found = read_yaml(config)["checkpoint"]
        return CheckpointConfig(monitor=found["monitor"], mode=found["mode"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{config} does not say which checkpoint is best ({type(error).__name__}); write "
            "model.weights=RUN/checkpoints/step-XXXXXXXX"
        ) from error


def _read(path: Path) -> Mapping[str, Tensor]:
    """Return the state_dict of a checkpoint or a file; see ``starting_weights``."""
    named = f"model.weights ({path})"
    if path.is_dir():
        loaded: Any = load_checkpoint(path).get("objects")
    elif path.suffix == ".safetensors":
        return read_export(path, named=named)[0]
    else:
        fix = "save the model's state_dict(), not the model"
        loaded = load_plain_data(path, named=named, fix=fix)
    outer: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {}
    for found in (outer, outer.get("model"), outer.get("state_dict")):
        tensors = dict(found) if isinstance(found, Mapping) else {}
        if tensors and all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            return tensors
    raise UserError(f"{named} holds no state_dict, not even as model or state_dict; give one")
