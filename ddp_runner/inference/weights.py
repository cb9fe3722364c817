"""Finds the weights of a run that ``inference.weights`` asks for: exported, or in a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.store import (
    best_checkpoints,
    first_whole,
    latest_checkpoint,
    load_checkpoint,
)
from ddp_runner.checkpoint.weights import read_export
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train.export import model_state


@dataclass(frozen=True)
class Weights:
    """A model's state_dict, and where it comes from."""

    tensors: Mapping[str, Tensor]  # on the CPU
    step: int  # optimizer steps that made it
    path: Path  # model.safetensors, or the folder of a checkpoint


def find_weights(
    run_dir: RunDir, config: Config, asked: str | int, *, log: Callable[[str], None]
) -> Weights:
    """Return the weights that a run's evaluations have used: averaged ones with ema.evaluate.

    Args:
        run_dir: of the run.
        config: of the run.
        asked: best, last, or the step of a checkpoint; see ``InferenceConfig``.
        log: takes a sentence about each damaged checkpoint that is passed over.

    Raises:
        UserError: the run has no such weights, or they are damaged.
    """
    if asked == "best" and run_dir.export.exists():
        path = run_dir.export
        tensors, facts = read_export(path, named=str(path))
        step = facts.get("step", "")
        return Weights(tensors, int(step) if step.isdecimal() else 0, path)
    checkpoint = _checkpoint(run_dir, config, asked, log=log)
    content = load_checkpoint(checkpoint)
    is_average = config.ema.decay is not None and config.ema.evaluate
    state = model_state(content, is_average=is_average)
    if not isinstance(state, Mapping):
        raise UserError(
            f"checkpoint {checkpoint} holds no model; name another by inference.weights"
        )
    return Weights(state, read_manifest(checkpoint).step, checkpoint)


def _checkpoint(
    run_dir: RunDir, config: Config, asked: str | int, *, log: Callable[[str], None]
) -> Path:
    """Return the folder of a checkpoint that is asked for."""
    folder, settings = run_dir.checkpoints, config.checkpoint
    found = None
    if isinstance(asked, int):
        found = folder / f"step-{asked:08d}"
        if not found.is_dir():
            kept = ", ".join(str(int(one.name[5:])) for one in sorted(folder.glob("step-*")))
            raise UserError(
                f"inference.weights ({asked}): {run_dir} has no checkpoint of that step; it has "
                f"{kept or 'none'}"
            )
        return found
    if asked == "best" and settings.monitor is not None:
        ranking = best_checkpoints(folder, monitor=settings.monitor, mode=settings.mode)
        found = first_whole(ranking, log=log)
    found = found or latest_checkpoint(folder, log=log)
    if found is None:
        raise UserError(
            f"{run_dir} has neither {run_dir.export.name} nor a checkpoint: it has trained nothing "
            "yet; name another run"
        )
    return found
