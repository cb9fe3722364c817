"""Computes metrics of an evaluation: each rank updates its own objects, which are then merged.

A metric of ours or the user's is sent to the other ranks as a whole. A torchmetrics class has a
reduction for each of its states, so only the states are sent.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_runner.data.trees import shape_of
from ddp_runner.errors import UserError, typed

UNSENT = "cannot be sent to other ranks", "remove lambdas and open files from it"


@runtime_checkable
class Metric(Protocol):
    """The interface of a metric.

    It also needs ``merge(other)``, which adds the next rank's object, maybe without batches;
    torchmetrics classes do not. The optional ``higher_is_better`` is True or False.
    """

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch: the outputs and targets of a training step, on their device."""

    def compute(self) -> Any:
        """Return a number, a vector of numbers, or a mapping from names to numbers."""


def summed(*names: str) -> Callable[[Any, Any], None]:
    """Return a ``merge`` method that adds the named attributes of two metrics.

    Write ``merge = summed("hits", "count")`` in the class. Numbers, tensors and arrays are added,
    lists are joined in the order of the ranks, and dicts are added key by key. Before the first
    batch an attribute is 0, empty or None.
    """

    def merge(self: Any, other: Any) -> None:
        for name in names:
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))

    return merge


def _sum(value: Any, other: Any) -> Any:
    if value is None or other is None:
        return other if value is None else value
    if not isinstance(value, dict):
        return value + other
    for key, more in other.items():  # in place: the value may be a Counter
        value[key] = _sum(value.get(key), more)
    return value


def directions(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return the best end, max or min, of each metric with ``higher_is_better``, by eval/NAME."""
    higher = {name: getattr(metric, "higher_is_better", None) for name, metric in metrics.items()}
    return {f"eval/{name}": "max" if up else "min" for name, up in higher.items() if up is not None}


class ComputeError(UserError):
    """The ``compute`` of a metric raised an exception."""


class Evaluation:
    """The metrics of an evaluation set that is split among the ranks.

    They are copies, by name, on the device of the outputs and targets.

    Raises:
        UserError: a metric has no ``merge``, or cannot be sent to the other ranks.
    """

    def __init__(self, metrics: Mapping[str, Metric], *, device: torch.device) -> None:
        self._device, self._metrics = device, dict[str, Any]()
        for name, metric in metrics.items():
            with _named(name, metric, *UNSENT):
                self._metrics[name] = _fresh(metric, device)

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch of this rank.

        Raises:
            UserError: a metric does not accept the batch.
        """
        for name, metric in self._metrics.items():
            if outputs is None:
                raise UserError(
                    f"metrics.{name} needs the outputs of the model, and train.step returns none",
                    "return StepOutput(loss_sum, count, outputs=OUTPUTS, targets=TARGETS)",
                )
            batch = f"outputs {shape_of(outputs)} with targets {shape_of(targets)}"
            with _named(name, metric, f"cannot take {batch}"):
                metric.update(outputs, targets)

    def packed(self) -> dict[str, bytes]:
        """Return each metric in bytes, for the other ranks."""
        states = dict[str, bytes]()
        for name, metric in self._metrics.items():
            with _named(name, metric, *UNSENT):
                states[name] = packed(metric)
        return states

    def over(self, by_rank: Sequence[Mapping[str, bytes]]) -> dict[str, float]:
        """Return each metric over all ranks' samples, as ``eval/NAME``. Call it once.

        `by_rank` has each rank's ``packed``; a rank may have no batch.

        Raises:
            UserError: the states of a metric cannot be merged, or it does not compute a number.
        """
        results = dict[str, float]()
        for name, metric in self._metrics.items():
            with _named(name, metric, "cannot merge the object of another rank"):
                total = merged(metric, [states[name] for states in by_rank], self._device)
            after = " after its merge" if len(by_rank) > 1 else ""
            with _named(name, metric, f"cannot be computed{after}", kind=ComputeError):
                value = total.compute()
            fix = "return a number, a vector of numbers, or a mapping from names to numbers"
            with _named(name, metric, f"computes {shape_of(value)}", fix):
                results |= _numbers(name, value)
        return results


@contextmanager
def _named(
    name: str,
    metric: Metric,
    failed: str,
    fix: str = "correct it, or choose a metric that fits the model",
    kind: type[UserError] = UserError,
) -> Iterator[None]:
    """Name the metric in any error of the block, except a lack of memory."""
    try:
        yield
    except Exception as error:  # the user's code raises anything
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = f" {failed}: {typed(error)}; {fix}"
        if isinstance(error, UserError):
            reason = f": {error}"
        raise kind(f"{title(name, metric)}{reason}") from error


def title(name: str, metric: Metric) -> str:
    """Return a metric's name and class, for messages."""
    return f"metrics.{name} ({type(metric).__name__})"


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each number that a metric computed."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}_{key}", item)
    elif isinstance(value, Tensor) and value.ndim == 1 and value.numel() != 1:
        for index, item in enumerate(value.tolist()):
            yield f"eval/{name}_{index}", float(item)
    else:
        yield f"eval/{name}", float(value)


def packed(metric: Metric) -> bytes:
    """Return a metric, or the states of a torchmetrics metric, in bytes."""
    states = [
        {name: getattr(part, name) for name in (*part._reductions, "_update_count")}
        for part in _torchmetrics(metric)
    ]
    buffer = BytesIO()
    torch.save(states or metric, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes, device: torch.device) -> Any:
    return torch.load(BytesIO(data), map_location=device, weights_only=False)


def merged(metric: Metric, by_rank: Sequence[bytes], device: torch.device) -> Any:
    """Return the merged metric of all ranks; `metric` may change."""
    states = [_unpacked(data, device) for data in by_rank]
    if parts := _torchmetrics(metric):
        for part, part_states in zip(parts, zip(*states, strict=True), strict=True):
            _merge(part, part_states)
        return metric
    total = states[0]
    for other in states[1:]:
        total.merge(other)
    return total


def _fresh(metric: Metric, device: torch.device) -> Any:
    """Return a copy of a metric with its tensors on a device."""
    if _torchmetrics(metric):
        clone: Any = copy.deepcopy(metric)
        clone.to(device)  # returns None for a collection
        return clone
    if not hasattr(metric, "merge"):
        raise UserError(
            "it has no merge(self, other), which combines the metrics of two ranks",
            'write it, or merge = summed("hits", "count") with ddp_runner.summed',
        )
    return _unpacked(packed(metric), device)


def _torchmetrics(metric: Any) -> list[Any]:
    """Return a torchmetrics metric and the metrics inside it; an empty list for other objects.

    torchmetrics has no public name for a state's reduction. Its own exchange fails for a rank
    without samples, which has empty lists of another shape and type than the other ranks expect.
    Checked with torchmetrics 1.9.
    """
    is_collection = isinstance(metric, nn.ModuleDict) and hasattr(metric, "compute_groups")
    if not (is_collection or hasattr(metric, "_reductions")):
        return []
    return [module for module in metric.modules() if hasattr(module, "_reductions")]


def _merge(metric: Any, states: Sequence[dict[str, Any]]) -> None:
    """Set the states of a torchmetrics metric to the reductions over all ranks' states.

    A reduction gets a stack of the ranks' tensors, or a joined list. A sum over each output, as in
    R2Score, is a single 0 on a rank without samples, so tensors are broadcast.
    """
    if any(state.keys() != states[0].keys() for state in states):
        raise UserError(
            "it adds states with its first batch, so a rank without samples lacks them",
            "set the arguments that it infers from that batch, such as num_classes",
        )
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in states]
        is_list = isinstance(values[0], list)
        joined = list(chain(*values)) if is_list else torch.stack(torch.broadcast_tensors(*values))
        is_empty = is_list and not joined
        setattr(metric, name, joined if reduction is None or is_empty else reduction(joined))
    metric._update_count = sum(state["_update_count"] for state in states)
    metric.distributed_available_fn = lambda: False  # compute would exchange the states again
