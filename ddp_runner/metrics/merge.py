"""Sends a metric's objects between ranks, and merges them into one that had all batches.

A metric of ours or of the user's is sent as a whole, and its ``merge`` takes in the next rank's.
Classes of torchmetrics name a reduction for each of their states, so only the states are sent.
"""

import copy
import pickle
from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import Metric


def fresh(metric: Metric, device: torch.device) -> Any:
    """Return a copy of a metric with its tensors on a device.

    Raises:
        UserError: it has no ``merge``.
    """
    if _torchmetrics(metric):
        theirs: Any = copy.deepcopy(metric)
        theirs.to(device)  # of a collection it returns nothing
        return theirs
    if not hasattr(metric, "merge"):
        raise UserError(
            "it has no merge(self, other), which makes one metric of those of two ranks; write it, "
            'or merge = summed("hits", "count") with ddp_runner.metrics.metric.summed'
        )
    return unpacked(packed(metric), device)


def packed(metric: Metric) -> bytes:
    """Return what other ranks need of a metric."""
    parts, buffer = _torchmetrics(metric), BytesIO()
    _Pickler(buffer).dump([_their_state(part) for part in parts] if parts else metric)
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device) -> Any:
    """Return what was packed, with its tensors on a device."""
    with device:
        return pickle.loads(data)


def merged(own: Metric, by_rank: Sequence[bytes], device: torch.device) -> Any:
    """Return a metric that has what all ranks have taken in; `own` is changed.

    Raises:
        UserError: the ranks have other states.
    """
    states = [unpacked(one, device) for one in by_rank]
    if parts := _torchmetrics(own):
        for index, part in enumerate(parts):
            _merge_theirs(part, [state[index] for state in states])
        return own
    for other in states[1:]:
        states[0].merge(other)
    return states[0]


class _Pickler(pickle.Pickler):
    """Copies tensors to the CPU: a view would be sent with all of what it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        return _placed, value.detach().to("cpu", copy=True).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _placed(build: Any, arguments: Any) -> Any:
    return build(*arguments).to(torch.get_default_device())


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
    state = {name: getattr(metric, name) for name in metric._reductions}
    return {**state, "_update_count": metric._update_count}


def _merge_theirs(metric: Any, states: Sequence[dict[str, Any]]) -> None:
    """Set the states of all ranks in a metric of torchmetrics, reduced as it asks.

    Its exchange gives a reduction the ranks' tensors as one stack, and lists as one list. A sum
    over each output, as in R2Score, is a single 0 on a rank without samples.

    Raises:
        UserError: ranks have other states.
    """
    if any(state.keys() != states[0].keys() for state in states):
        raise UserError(
            "it adds states with its first batch, so a rank without samples lacks them; give it "
            "what it takes from that batch, such as num_classes"
        )
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in states]
        is_list = isinstance(values[0], list)
        joined = list(chain(*values)) if is_list else torch.stack(torch.broadcast_tensors(*values))
        is_empty = is_list and not joined
        setattr(metric, name, joined if reduction is None or is_empty else reduction(joined))
    metric._update_count = sum(state["_update_count"] for state in states)
    metric.distributed_available_fn = lambda: False  # its compute would exchange them once more
