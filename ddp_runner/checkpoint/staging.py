"""Copies a training state to the CPU, into memory that is used again for the next copy.

Torch's DefaultStager does the same, but that of torch 2.11 works once: it clears its own table of
types after the first state.
"""

import copy
from typing import Any

import torch
from torch import Tensor


class Stager:
    """Holds the memory of one copy; a first copy takes as long as it takes to allocate it.

    Args:
        pinned: whether the memory is page-locked: a copy from a CUDA device is faster then.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: dict[Any, Tensor] = {}

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy, which shares no memory with the state; the copy before it is overwritten.

        Args:
            state: tensors on any device, numbers, strings, and lists and dicts of them. Tensors
                that share memory do so in the copy as well.
        """
        before, self._memory = self._memory, {}
        copied: dict[str, Any] = self._copy(state, before)
        return copied

    def _copy(self, value: Any, before: dict[Any, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, before)
        if isinstance(value, dict):
            copied = copy.copy(value)  # with the version numbers that state_dict() hangs on its own
            for key, one in value.items():
                copied[key] = self._copy(one, before)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy(one, before) for one in value)
        return copy.deepcopy(value)

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor, before: dict[Any, Tensor]) -> Tensor:
        source = tensor.untyped_storage()
        key = (tensor.device, source.data_ptr(), source.nbytes())
        if key not in self._memory:
            memory = before.get(key)
            if memory is None:
                memory = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=self._pinned)
            # It waits until the copy is made: a step that follows may change what is copied.
            memory.untyped_storage().copy_(source)
            self._memory[key] = memory
        target = self._memory[key].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            target, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
