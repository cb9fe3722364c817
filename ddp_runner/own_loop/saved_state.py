"""Saves the objects that a loop of the user's own names, and restores them bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_runner.checkpoint.plain_data import reject_sharded
from ddp_runner.checkpoint.store import load_checkpoint
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError, typed
from ddp_runner.rank.rng import rng_state, set_rng_state

PARTS = {"task", "step", "objects", "rng"}


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
    objects: Mapping[str, Any], *, task: str, step: int, device: torch.device
) -> dict[str, Any]:
    """Return the state of the objects and of all ranks' random numbers. Collective.

    Args:
        objects: by name; rank 0's state is the one that is saved.
        task: whose objects they are.
        step: steps taken.
        device: the rank's first.

    Raises:
        UserError: a parameter is NaN or infinite, or a tensor is only this rank's shard. Such a
            state is never saved.
    """
    for name, value in objects.items():
        for key, one in value.named_parameters() if isinstance(value, nn.Module) else ():
            if not torch.isfinite(one).all():
                raise UserError(
                    f"parameter {name}.{key} became NaN or infinite by step {step}; it was not "
                    "saved: start again with a smaller learning rate, or resume from an earlier "
                    "checkpoint"
                )
    states = {
        name: dict(value) if isinstance(value, dict) else value.state_dict()
        for name, value in objects.items()
    }
    reject_sharded(states)
    rng = gather_objects(rng_state(device))
    return {"task": task, "step": step, "objects": states, "rng": rng}


def load_state(
    objects: Mapping[str, Any], path: Path, *, task: str, rank: int, device: torch.device
) -> tuple[int, bool]:
    """Load a checkpoint into the objects, and this rank's random numbers.

    Returns:
        The steps taken, and whether the random numbers were loaded: they are only if the number of
        ranks is the checkpoint's.

    Raises:
        UserError: the checkpoint has other objects, or one does not fit.
    """
    content: Any = load_checkpoint(path)
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
            else:
                value.load_state_dict(saved[name])
        except Exception as error:  # of anybody's class: any kind
            reason = str(error) if isinstance(error, UserError) else typed(error)
            raise UserError(f"checkpoint {path} does not fit {name}: {reason}") from error
    has_all_ranks = len(content["rng"]) == torch.distributed.get_world_size()
    if has_all_ranks:
        set_rng_state(content["rng"][rank], device)
    return int(content["step"]), has_all_ranks


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
