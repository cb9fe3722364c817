"""What the user's code is told of the other ranks while one process takes its step."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_runner.data.splits import MicroBatch
from ddp_runner.distributed import gather_objects
from ddp_runner.train.state import TrainState, forward, restored_after

ANSWERS = {"get_rank": 0, "get_world_size": 1}  # of torch.distributed
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def as_only_rank() -> Iterator[None]:
    """Answer as in one process when code asks for its rank, or for the number of ranks.

    A question about a group that it names has the real answer.
    """

    def answer(real: Callable[[Any], int], number: int, group: Any = None) -> int:
        return number if group is None else real(group)

    answers: dict[str, Any] = {
        name: partial(answer, getattr(dist, name), number) for name, number in ANSWERS.items()
    }
    before = {name: os.environ.get(name) for name in VARIABLES}
    with patch.multiple(dist, **answers):
        os.environ.update(VARIABLES)
        try:
            yield
        finally:  # not patch.dict: it would unset all variables for a moment
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


class _Collectives(TorchDispatchMode):
    """Notes whether any operation communicates."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def communicates(state: TrainState, model: nn.Module, batch: MicroBatch) -> bool:
    """Return whether a step of a model itself communicates, as SyncBatchNorm does.

    Such code needs the real answers: it adds over the real ranks. Collective: every rank must call.
    """
    operations = _Collectives()  # type: ignore[no-untyped-call]  # torch's has no types
    with restored_after(state), operations:
        forward(state.work, model.train(), batch)
    return any(gather_objects(operations.found))
