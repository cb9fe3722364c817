"""What a metric is: any object with ``update`` and ``compute``."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """What an evaluation needs of a metric.

    It may also have ``higher_is_better``: True or False.
    """

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch: the outputs and targets of a training step, on their device."""

    def compute(self) -> Any:
        """Return a number, a vector of numbers, or a mapping from names to numbers."""


@runtime_checkable
class Mergeable(Metric, Protocol):
    """A metric whose state is not a sum: it says itself how the states of two ranks become one."""

    def merge(self, other: Any) -> None:
        """Take in what the object of another rank has taken in."""


def direction(metric: Metric) -> str | None:
    """Return which value of a metric is best, max or min; None if its class does not say."""
    is_higher_better = getattr(metric, "higher_is_better", None)
    return None if is_higher_better is None else "max" if is_higher_better else "min"
