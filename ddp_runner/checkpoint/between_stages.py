"""Merges the states of a pipeline's stages into the whole model's, by names."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_runner.distributed import gather_objects
from ddp_runner.parallelism.shards import for_rank_zero, holders_of, map_leaves, spec_of


def merged(trees: Sequence[Any]) -> Any:
    """Return nested states with the keys, and the items of lists of names, of all of them."""
    first = trees[0]
    if isinstance(first, Mapping):
        result: Any = copy.copy(first)  # a module's state_dict carries `_metadata`
        for key in dict.fromkeys(key for tree in trees for key in tree):
            result[key] = merged([tree[key] for tree in trees if key in tree])
        return result
    if not isinstance(first, list | tuple):
        return first
    if all(isinstance(name, str) for tree in trees for name in tree):
        return [*dict.fromkeys(name for tree in trees for name in tree)]
    return type(first)(map(merged, zip(*trees, strict=True)))


class StageStates:
    """The states of all stages as one. Each method is collective: every rank must call.

    Args:
        state: this rank's: tensors, whole or split, and dicts and lists of them.
        group: the ranks that have a part of the state.
    """

    def __init__(self, state: Any, *, group: dist.ProcessGroup | None) -> None:
        self._own, self._group = dict[str, Tensor](), group
        self._merged = merged(gather_objects(map_leaves(self._spec, state), group=group))
        self.holders = holders_of(self._own, group=group)  # the first rank that has a tensor

    def _spec(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._own[name] = value
        return spec_of(value)

    def own(self) -> Any:
        """Return the merged state with this rank's tensors, and specs of all others."""
        return map_leaves(self._own.get, self._merged)

    def gathered(self, *, keep: bool) -> Any:
        """Return the merged state with whole tensors on the CPU; None for them unless `keep`."""

        def whole(name: str, spec: Any) -> Any:
            if not isinstance(spec, Tensor):
                return spec
            holder, own = self.holders[name], self._own.get(name)
            value = for_rank_zero(own, spec, holder=holder, group=self._group)
            return value.cpu() if keep else None

        return map_leaves(whole, self._merged)
