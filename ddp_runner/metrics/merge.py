"""Merges a metric's objects of all ranks, as if one object had taken in all batches.

- What ``update`` adds to numbers, tensors and NumPy arrays is summed over the ranks, and what it
  appends to lists is joined in the order of the ranks. Both hold inside dicts and for a metric that
  is an attribute of a metric. What ``update`` leaves alone, such as ``k`` or weights, stays.
- A metric whose state is not a sum has a method ``merge(other)``.
- The classes of torchmetrics name a reduction for each of their states.
"""

import copy
import operator
from collections import deque
from collections.abc import Sequence
from functools import reduce
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_runner.metrics.metric import Mergeable, Metric

# What is compared, since it cannot be added: it must be the same on all ranks that changed it.
COMPARED = (str, bytes, tuple, set, frozenset, deque)
CPU = torch.device("cpu")


class UnmergeableError(Exception):
    """Why a metric's state cannot be merged: the rest of a sentence that begins with its name."""


def state_of(metric: Metric) -> Any:
    """Return what other ranks need of a metric, to be pickled, and move its tensors to the CPU."""
    moved(metric, CPU)
    if parts := _torchmetrics(metric):
        return [_their_state(part) for part in parts]
    if isinstance(metric, Mergeable):
        return metric
    return {name: _state(value) for name, value in vars(metric).items() if _is_state(value)}


def merged(own: Metric, start: Metric, states: Sequence[Any]) -> Metric:
    """Return a metric with what all ranks have taken in, on the CPU; `own` is changed.

    Args:
        own: this rank's object.
        start: as it was before any batch.
        states: from ``state_of``, by rank.

    Raises:
        UnmergeableError: a part of the state is neither a sum nor a list.
    """
    if parts := _torchmetrics(own):
        for index, part in enumerate(parts):
            _merge_theirs(part, [state[index] for state in states])
        return own
    if isinstance(own, Mergeable):
        whole: Mergeable = copy.deepcopy(states[0])
        for other in states[1:]:
            whole.merge(other)
        return whole
    before, now = vars(moved(start, CPU)), vars(own)
    for name in dict.fromkeys(name for state in states for name in state):
        first = before.get(name)
        values = [state.get(name, first) for state in states]
        now[name] = _total(name, first, values, own=now.get(name))
    return own


def moved(value: Any, device: torch.device) -> Any:
    """Return a metric, or a value of its state, with its tensors on a device; it is changed."""
    if isinstance(value, Tensor):
        return _whole(value.to(device))
    if isinstance(value, list):
        value[:] = [moved(item, device) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():  # not by update, with which a Counter adds
            value[key] = moved(item, device)
    elif isinstance(value, nn.Module):
        value.to(device)
    if isinstance(value, Metric) and not _torchmetrics(value):
        vars(value).update({name: moved(item, device) for name, item in vars(value).items()})
    return value


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor that is no part of another: it would be pickled with all of the other.

    The targets of a batch may be a part of all targets.
    """
    is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_part else tensor


def _is_state(value: Any) -> bool:
    kinds = (Tensor, np.ndarray, Number, list, dict, *COMPARED)
    return value is None or isinstance(value, (*kinds, Metric))


def _state(value: Any) -> Any:
    if isinstance(value, list):
        return [_state(item) for item in value]
    if isinstance(value, dict):
        return {key: _state(item) for key, item in value.items() if _is_state(item)}
    return state_of(value) if isinstance(value, Metric) else value


def _total(name: str, start: Any, values: Sequence[Any], *, own: Any) -> Any:
    """Return an attribute's start and what each rank has done to it since.

    Raises:
        UnmergeableError: this cannot be added up.
    """
    if isinstance(own, Metric):
        return merged(own, start, values)
    kind = next((type(value) for value in (start, *values) if value is not None), type(None))
    if issubclass(kind, list):
        return _joined(name, start or [], [value or [] for value in values])
    if issubclass(kind, dict):
        before, total = start or {}, own if own is not None else {}
        for key in dict.fromkeys(key for value in values for key in value or {}):
            first = before.get(key)
            of_ranks = [(value or {}).get(key, first) for value in values]
            total[key] = _total(f"{name}[{key!r}]", first, of_ranks, own=total.get(key))
        return total
    changed = [value for value in values if not _is_same(value, start)]
    if not changed:
        return start
    if all(isinstance(value, Tensor | np.ndarray | Number) for value in changed):
        return _sum(name, start, changed)
    if all(_is_same(value, changed[0]) for value in changed):
        return changed[0]
    raise UnmergeableError(
        f"has a {kind.__name__} in {name} that differs between ranks and is no sum; keep numbers, "
        "tensors, and lists or dicts of them, or write merge(self, other)"
    )


def _joined(name: str, start: list[Any], values: Sequence[list[Any]]) -> list[Any]:
    """Return the total of the items that were there, and all appended ones in order of the ranks.

    Raises:
        UnmergeableError: a list became shorter.
    """
    length = len(start)
    if any(len(value) < length for value in values):
        raise UnmergeableError(
            f"takes items out of the list {name}; only append to it, or write merge(self, other)"
        )
    kept = [
        _total(f"{name}[{index}]", item, [value[index] for value in values], own=item)
        for index, item in enumerate(start)
    ]
    return [*kept, *(item for value in values for item in value[length:])]


def _sum(name: str, start: Any, changed: Sequence[Any]) -> Any:
    """Return the start and the sum of the changes; of bools, whether any rank changed them.

    Raises:
        UnmergeableError: shapes differ, which would be broadcast.
    """
    shapes = {tuple(np.shape(value)) for value in changed}
    if start is not None:
        shapes |= {tuple(np.shape(start))} - {()}
    if len(shapes) > 1:
        raise UnmergeableError(
            f"has shapes {' and '.join(map(str, sorted(shapes)))} in {name}, which cannot be added "
            "over ranks; append to a list instead, or write merge(self, other)"
        )
    if start is None:
        return reduce(operator.or_ if _is_bool(changed[0]) else operator.add, changed)
    if _is_bool(start):
        return start ^ reduce(operator.or_, [value ^ start for value in changed])
    return start + reduce(operator.add, [value - start for value in changed])


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, np.bool_)


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return not isinstance(value, Tensor | np.ndarray) and bool(value == other)
    if isinstance(value, Tensor | np.ndarray):
        return value.shape == other.shape and bool((value == other).all())
    if isinstance(value, tuple | deque):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)


def _torchmetrics(metric: Any) -> list[Any]:
    """Return a metric of torchmetrics and the metrics inside of it; nothing for other objects.

    torchmetrics has no public name for how a state is reduced. Its own exchange is not used: a rank
    without samples has empty lists, whose shape and type the other ranks do not expect. Checked
    with torchmetrics 1.9.
    """
    is_collection = isinstance(metric, nn.ModuleDict) and hasattr(metric, "compute_groups")
    if not (is_collection or hasattr(metric, "_reductions")):
        return []
    return [module for module in metric.modules() if hasattr(module, "_reductions")]


def _their_state(metric: Any) -> dict[str, Any]:
    state = {name: moved(getattr(metric, name), CPU) for name in metric._reductions}
    return {**state, "_update_count": metric._update_count}


def _merge_theirs(metric: Any, states: Sequence[dict[str, Any]]) -> None:
    """Set the states of all ranks in a metric of torchmetrics, reduced as it asks.

    Its exchange gives a reduction the ranks' tensors as one stack, and lists as one list.

    Raises:
        UnmergeableError: ranks have other states.
    """
    if any(state.keys() != states[0].keys() for state in states):
        raise UnmergeableError(
            "adds states with its first batch, so a rank without samples lacks them; give it what "
            "it takes from that batch, such as num_classes"
        )
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in states]
        is_list = isinstance(values[0], list)
        joined = [item for value in values for item in value] if is_list else torch.stack(values)
        is_empty = is_list and not joined
        setattr(metric, name, joined if reduction is None or is_empty else reduction(joined))
    metric._update_count = sum(state["_update_count"] for state in states)
    metric.distributed_available_fn = lambda: False  # its compute would exchange them once more
