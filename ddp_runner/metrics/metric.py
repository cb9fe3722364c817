"""What a metric is: any object with ``update``, ``compute`` and ``merge``."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """What every metric has.

    It also has ``merge(other)``, which takes in what the object of the next rank has taken in,
    maybe no batch; classes of torchmetrics need none. ``higher_is_better``, True or False, may say
    which value is best.
    """

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch: the outputs and targets of a training step, on their device."""

    def compute(self) -> Any:
        """Return a number, a vector of numbers, or a mapping from names to numbers."""


def summed(*names: str) -> Callable[[Any, Any], None]:
    """Return the ``merge`` of a metric whose attributes only grow.

    A class has the line ``merge = summed("hits", "count")``. Numbers, tensors and arrays are added,
    lists are joined in the order of the ranks, and dicts are added key by key. Before the first
    batch an attribute is 0, empty or None.
    """

    def merge(self: Any, other: Any) -> None:
        for name in names:
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))

    return merge


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):  # changed in place: it may be a Counter
        for key, value in other.items():
            one[key] = _sum(one[key], value) if key in one else value
        return one
    return one + other


def direction(metric: Metric) -> str | None:
    """Return which value of a metric is best, max or min; None if its class does not say."""
    is_higher_better = getattr(metric, "higher_is_better", None)
    return None if is_higher_better is None else "max" if is_higher_better else "min"


def directions(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return the direction of each metric that has one, by eval/NAME."""
    ends = {f"eval/{name}": direction(metric) for name, metric in metrics.items()}
    return {name: end for name, end in ends.items() if end is not None}
