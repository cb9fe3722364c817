"""Saves the objects that a loop of the user's own names, and restores them bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_runner.checkpoint.fetched import on_every_machine
from ddp_runner.checkpoint.plain_data import reject_sharded
from ddp_runner.checkpoint.store import latest_checkpoint, load_checkpoint
from ddp_runner.distributed import from_rank_zero
from ddp_runner.errors import UserError, typed
from ddp_runner.parallelism.shards import first_not_finite, gathered, load_module, load_optimizer
from ddp_runner.rank.session import Session

PARTS = {"task", "step", "objects"}


def validate_objects(objects: Mapping[str, Any]) -> None:
    """Reject what cannot be saved and restored in place.

    Raises:
        UserError: an object has no ``state_dict`` and ``load_state_dict``, and is not a dict.
    """
    for name, value in objects.items():
        has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if not has_state and not isinstance(value, dict):
            raise UserError(
                f"{name}, a {type(value).__name__}, has no state_dict and load_state_dict; give "
                "run.restore an object that has, or plain values in a dict, which it updates"
            )


def state_of(
    objects: Mapping[str, Any], session: Session, step: int, copies: set[int]
) -> dict[str, Any]:
    """Return the state of the objects. Collective.

    Args:
        objects: by name; rank 0's state is the one that is saved.
        session: of this rank.
        step: steps taken.
        copies: takes the addresses of tensors that are copies already, as ``gathered``.

    Raises:
        UserError: a parameter is NaN or infinite, or a tensor is only this rank's shard. Such a
            state is never saved.
    """
    for name, value in objects.items():
        if not isinstance(value, nn.Module):
            continue
        if (key := first_not_finite(value.named_parameters())) is not None:
            raise UserError(
                f"parameter {name}.{key} became NaN or infinite by step {step}; it was not "
                "saved: start again with a smaller learning rate, or resume from an earlier "
                "checkpoint"
            )
    states = {
        name: dict(value) if isinstance(value, dict) else value.state_dict()
        for name, value in objects.items()
    }
    states = gathered(states, keep=session.env.is_rank_zero, copies=copies)
    reject_sharded(states)
    return {"task": session.config.task, "step": step, "objects": states}


def load_newest(objects: Mapping[str, Any], session: Session) -> int | None:
    """Load the run's newest valid checkpoint, if it has any. Collective: every rank must call.

    Returns:
        The steps taken; None if the run begins at step 0.

    Raises:
        UserError: the checkpoint does not fit the objects, or every checkpoint is damaged.
    """
    folder, log = session.run_dir.checkpoints, session.log
    path = from_rank_zero(lambda: latest_checkpoint(folder, log=log))
    if path is None:
        if session.config.resume is not None:
            log(f"{folder} holds no checkpoint: the run begins at step 0")
        return None
    with on_every_machine(path) as found:
        content: Any = load_checkpoint(found)
    _load(objects, content, path, task=session.config.task)
    log(f"resumed from {path}, step {content['step']}")
    return int(content["step"])


def _load(objects: Mapping[str, Any], content: Any, path: Path, *, task: str) -> None:
    """Load the objects' states from a checkpoint's content.

    Raises:
        UserError: it is of another task, has other objects, or one does not fit.
    """
    if not isinstance(content, dict) or not content.keys() >= PARTS or content["task"] != task:
        made_by = content.get("task", "train") if isinstance(content, dict) else "no task"
        raise UserError(
            f"checkpoint {path} was made by task={made_by}, and this is task={task}; resume with "
            "the task that it was made with"
        )
    saved, given = content["objects"], set(objects)
    if saved.keys() != given:
        raise UserError(
            f"checkpoint {path} has {_listed(saved)}, and run.restore was called with "
            f"{_listed(given)}; give it the same names, or start a new run"
        )
    for name, value in objects.items():
        try:
            if isinstance(value, dict):
                value.clear()
                value.update(saved[name])
            elif isinstance(value, nn.Module):
                load_module(value, saved[name])
            elif isinstance(value, Optimizer):
                load_optimizer(value, saved[name])
            else:
                value.load_state_dict(saved[name])
        except Exception as error:  # of anybody's class: any kind
            reason = str(error) if isinstance(error, UserError) else typed(error)
            raise UserError(f"checkpoint {path} does not fit {name}: {reason}") from error


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
