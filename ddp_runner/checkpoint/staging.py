"""Copies a training state to the CPU, into memory that the next copy uses again.

torch has a DefaultStager for this. In torch 2.11 it works only once: it clears its own table of
types after the first state.
"""

import copy
from typing import Any

import torch
from torch import Tensor


class Stager:
    """Holds the memory of one copy. The first copy is slower, because it allocates the memory.

    Args:
        pinned: use page-locked memory, which makes copies from a CUDA device faster.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: dict[Any, Tensor] = {}

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy that shares no memory with the state; it overwrites the previous copy.

        Args:
            state: tensors on any device, numbers, strings, and lists and dicts of them. Tensors
                that share memory also share it in the copy.
        """
        before, self._memory = self._memory, {}
        copied: dict[str, Any] = self._copy(state, before)
        return copied

    def _copy(self, value: Any, before: dict[Any, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, before)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps the _metadata that state_dict() attaches
            for key, item in value.items():
                copied[key] = self._copy(item, before)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, before) for item in value)
        return copy.deepcopy(value)

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor, before: dict[Any, Tensor]) -> Tensor:
        source = tensor.untyped_storage()
        key = (tensor.device, source.data_ptr(), source.nbytes())
        if key not in self._memory:
            memory = before.get(key)
            if memory is None:
                memory = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=self._pinned)
            # Wait for the copy: the next step changes the source.
            memory.untyped_storage().copy_(source)
            self._memory[key] = memory
        target = self._memory[key].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            target, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
