"""What may go into a saved state and come out of one: plain data, and whole tensors alone."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_runner.errors import UserError


def load_plain_data(file: Path, *, named: str, map_location: torch.device | str, fix: str) -> Any:
    """Returns what torch.save wrote, as long as it is plain data.

    Args:
        file: What to read.
        named: What it is called in the refusal.
        map_location: Where its tensors go.
        fix: What to do about a refusal.

    Raises:
        UserError: It holds anything else: it is refused, and none of its code runs.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        global_name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {global_name[1]}" if global_name else "it is not a file of plain data"
        raise UserError(
            f"{named} was refused: {what}, which could run code (none was run); {fix}"
        ) from error
    except Exception as error:  # of any kind, as bytes that are no file of torch's mean anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{named} cannot be read ({reason[:200]}); it is damaged or of another kind: use "
            "another one"
        ) from error


def refuse_sharded(state: Any, name: str = "the state") -> None:
    """Refuse tensors of which this rank holds only a part.

    Saved by one rank as if they were whole, they would lose the other ranks' parts unnoticed.

    Raises:
        UserError: There is one; its key is named.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            refuse_sharded(value, f"{name}[{key!r}]")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            refuse_sharded(value, f"{name}[{index}]")
    # DTensor, ShardedTensor and their kin, by where they are defined: importing them takes time.
    elif isinstance(state, torch.Tensor) and any(
        base.__module__.startswith("torch.distributed") for base in type(state).__mro__
    ):
        raise UserError(
            f"{name} is a {type(state).__name__}, of which each rank holds only a part, and a "
            "checkpoint holds whole tensors; train under parallelism=ddp, or give back whole "
            "tensors from the model's state_dict()"
        )
