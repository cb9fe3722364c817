"""Only plain data and whole tensors go into a saved state and come out of it."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from ddp_runner.errors import UserError, typed
from ddp_runner.files import leaves


def load_plain_data(file: Path, *, named: str, fix: str, is_mapped: bool = False) -> Any:
    """Return what torch.save wrote, its tensors on the CPU, if it is plain data.

    With `is_mapped` a tensor is read from the file when it is used. Change none of them.

    Raises:
        UserError: the file holds anything else; none of its code has run. `named` begins the
            message, and `fix` says what to do.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        global_name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {global_name[1]}" if global_name else "it is not a file of plain data"
        raise UserError(
            f"{named} was refused: {what}, which could run code (none was run); {fix}"
        ) from error
    except Exception as error:  # foreign bytes raise any kind
        reason = typed(error)
        raise UserError(
            f"{named} cannot be read ({reason[:200]}); it is damaged or of another kind; use "
            "another file"
        ) from error


def reject_sharded(state: Any, name: str = "the state") -> None:
    """Reject tensors of which this rank holds only a part.

    One rank would save its part as if it were whole, and the other ranks' parts would be lost.

    Raises:
        UserError: the state holds a part of a tensor; the message has its key.
    """
    for place, value in leaves(state, name):
        # DTensor, ShardedTensor, … by their module: importing the classes takes time.
        kinds = type(value).__mro__ if isinstance(value, torch.Tensor) else ()
        if any(kind.__module__.startswith("torch.distributed") for kind in kinds):
            raise UserError(
                f"{place} is a {type(value).__name__}, of which each rank holds only a part, and a "
                "checkpoint holds whole tensors; train under parallelism=ddp, or give back whole "
                "tensors from the model's state_dict()"
            )
