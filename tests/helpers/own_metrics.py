"""Metrics as users write them, good and bad ones; a module, since ranks import them by name."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.metrics.metric import summed
from ddp_runner.train.step import StepOutput


class Summed:
    """Sums tensors, weighted."""

    merge = summed("total", "count")

    def __init__(self) -> None:
        self.weight = torch.tensor(2.0)
        self.total, self.count = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.total += self.weight * (outputs.sum() - targets.sum())
        self.count += len(targets)

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.total / self.count


class Counted:
    """Counts in plain numbers, in a dict, in a list of outputs and in an array."""

    merge = summed("hits", "by_class", "kept", "halves")

    def __init__(self) -> None:
        self.k, self.hits, self.by_class = 3, 0, Counter[int]()
        self.kept: list[Tensor] = []
        self.halves = np.zeros(2)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.hits += int((outputs.argmax(dim=1) == targets).sum())
        self.kept.append(outputs[:, 0])
        for label in targets.tolist():
            self.by_class[label] += self.k
            self.halves[label % 2] += 1

    def compute(self) -> dict[str, float]:
        """Return the counts, and the first and last output."""
        ends = {"first": float(self.kept[0][0]), "last": float(self.kept[-1][-1])}
        by_class = {str(label): count for label, count in self.by_class.items()}
        return {"hits": self.hits, "odd": self.halves[1], **ends, **by_class}


class Appended:
    """Keeps outputs in a list that it makes with its first batch."""

    merge = summed("kept")

    def __init__(self) -> None:
        self.kept: Any = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.kept = [*(self.kept or []), outputs[:, 0]]

    def compute(self) -> Tensor:
        """Return the median."""
        return torch.cat(self.kept).median()


class Largest:
    """Keeps a maximum, which is no sum."""

    def __init__(self) -> None:
        self.largest = -torch.inf

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.largest = max(self.largest, float(outputs.max()))

    def merge(self, other: "Largest") -> None:
        """Take in another rank's."""
        self.largest = max(self.largest, other.largest)

    def compute(self) -> float:
        """Return the maximum."""
        return self.largest


class Last:
    """Keeps the last batch."""

    def __init__(self) -> None:
        self.last: Any = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.last = targets

    def merge(self, other: "Last") -> None:
        """Take in another rank's, if it has any."""
        self.last = self.last if other.last is None else other.last

    def compute(self) -> int:
        """Return its size."""
        return len(self.last)


class Nested:
    """Is made of two metrics."""

    def __init__(self) -> None:
        self.first, self.other = Summed(), Largest()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.first.update(outputs, targets)
        self.other.update(outputs, targets)

    def merge(self, other: "Nested") -> None:
        """Take in another rank's."""
        self.first.merge(other.first)
        self.other.merge(other.other)

    def compute(self) -> Tensor:
        """Return their difference."""
        return self.first.compute() - self.other.compute()


class Vector:
    """Computes a number for each class."""

    merge = summed("totals")

    def __init__(self) -> None:
        self.totals: Tensor | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        totals = outputs.sum(dim=0)
        self.totals = totals if self.totals is None else self.totals + totals

    def compute(self) -> Tensor:
        """Return the sums."""
        assert self.totals is not None
        return self.totals


class Nothing:
    """Computes no number."""

    merge = summed()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Return nothing."""


class Unmerged:
    """Keeps a maximum, and says nothing about ranks."""

    def __init__(self) -> None:
        self.largest = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.largest = max(self.largest, float(outputs.abs().max()))

    def compute(self) -> float:
        """Return the maximum."""
        return self.largest


class SumOfLargest(Unmerged):
    """Adds what is no sum."""

    merge = summed("largest")


class MeanOfMeans:
    """Is right for ranks with equally many samples."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.total += float(outputs.sum())
        self.count += len(outputs)

    def merge(self, other: "MeanOfMeans") -> None:
        """Take the mean of the means of those that have one."""
        means = [one.total / one.count for one in (self, other) if one.count]
        self.total, self.count = sum(means), len(means)

    def compute(self) -> float:
        """Return the mean."""
        return self.total / self.count


class Forgetful(Appended):
    """Leaves out the other's."""

    def merge(self, other: Appended) -> None:
        """Do nothing."""


class Fragile(Vector):
    """Cannot merge with a rank that had no batch."""

    def merge(self, other: Vector) -> None:
        """Take in another rank's."""
        self.totals += other.totals


class Drawn(Vector):
    """Draws random numbers."""

    def compute(self) -> Tensor:
        """Return noise."""
        return torch.randn(3)


@dataclass(frozen=True)
class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures of two halves, and the half of each pixel; a few pixels do not count."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        halves = torch.zeros(6, 6, dtype=torch.int64)
        halves[:, index % 5 :] = 1
        noise = torch.randn(1, 6, 6, generator=generator)
        halves[0, 0] = -100
        return halves[None].float() + noise, halves


def segmenter() -> nn.Module:
    """Return a model from pictures (batch, 1, 6, 6) to scores (batch, 2, 6, 6)."""
    return nn.Conv2d(1, 2, 3, padding=1)


def without_outputs(model: nn.Module, batch: Any) -> StepOutput:
    """Return a loss and nothing for metrics."""
    return StepOutput((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


def with_scalar(model: nn.Module, batch: Any) -> StepOutput:
    """Return a scalar under the name of a metric."""
    outputs = model(batch[0])
    loss = (outputs - batch[1]).square().sum()
    return StepOutput(loss, len(outputs), outputs, batch[1], scalars={"mae": loss.detach()})


class Demanding(Summed):
    """Cannot be computed from less than eight samples; then it is a mapping."""

    def compute(self) -> Any:
        """Return the mean by a name."""
        if self.count < 8:
            raise ValueError("too few")
        return {"mean": float(self.total)}
