"""Accepts only plain data and whole tensors in saved states."""

import re
from pathlib import Path
from typing import Any

import torch

from ddp_runner.errors import UserError, typed
from ddp_runner.files import leaves


def load_plain_data(file: Path, *, named: str, fix: str, is_mapped: bool = False) -> Any:
    """Return the plain data of a torch.save file, with tensors on the CPU; never run its code.

    With `is_mapped`, tensors are read from the file when used; do not change them.

    Raises:
        UserError: the file is damaged or has other objects; `named` starts the message.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # foreign bytes raise anything
        reason = f"it is damaged or of another kind ({typed(error)[:200]})"
        if (forbidden := re.search(r"GLOBAL (\S+)", str(error))) is not None:
            reason = f"refused: it names {forbidden[1]}, which could run code (none was run)"
        raise UserError(f"{named} cannot be loaded: {reason}", fix) from error


def reject_sharded(state: Any, name: str = "the state") -> None:
    """Reject sharded tensors: rank 0 would save only its own part.

    Raises:
        UserError: the state holds a sharded tensor; the message has its key.
    """
    for key, value in leaves(state, name):
        # Recognise DTensor, ShardedTensor, … by module: importing the classes takes time.
        kinds = type(value).__mro__ if isinstance(value, torch.Tensor) else ()
        if any(kind.__module__.startswith("torch.distributed") for kind in kinds):
            raise UserError(
                f"{key} is a {type(value).__name__}, so each rank has only a part of it, but a "
                "checkpoint holds whole tensors",
                "train under parallelism=ddp, or return whole tensors from the model's "
                "state_dict()",
            )
