"""The state of a stream between two blocks of samples, as a checkpoint keeps it."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ddp_runner.errors import UserError
from ddp_runner.files import leaves

PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)  # what a checkpoint holds


@dataclass(frozen=True)
class BlockStart:
    """Where a block begins, in the state of the stream before it."""

    block: int = 0
    num_read: int = 0  # samples that the stream gave before
    has_ended: bool = False  # there is no such block
    of_dataset: Any = None  # what the dataset's state_dict returned; None: it has none
    of_iterator: Any = None  # likewise of its iterator

    @property
    def has_state(self) -> bool:
        """Return whether the dataset saves its place itself."""
        return self.of_dataset is not None or self.of_iterator is not None


def state_of(part: Any, name: str) -> Any:
    """Return a copy of what the state_dict of a dataset or an iterator returns; None: it has none.

    `name` is the split's, for messages.

    Raises:
        UserError: a checkpoint cannot hold the state.
    """
    if not all(hasattr(part, method) for method in ("state_dict", "load_state_dict")):
        return None
    state = copy.deepcopy(part.state_dict())
    for place, value in leaves(state, f"the state of the {name} stream"):
        if not isinstance(value, PLAIN):
            raise UserError(
                f"{place} is a {type(value).__name__}, which a checkpoint cannot hold; return "
                "numbers, texts and tensors from its state_dict, in lists, tuples and dicts"
            )
    return state
