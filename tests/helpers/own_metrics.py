"""Metrics as users write them, good and bad ones; a module, since ranks import them by name."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.train.step import Step


class Summed:
    """Sums tensors, weighted."""

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
    """Counts in plain numbers, from a start that is not 0, in a dict and a list."""

    def __init__(self) -> None:
        self.k, self.hits, self.by_class = 3, 0.5, {}
        self.halves = [0, 0]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.hits += float((outputs.argmax(dim=1) == targets).sum())
        for label in targets.tolist():
            self.by_class[label] = self.by_class.get(label, 0) + self.k
            self.halves[label % 2] += 1

    def compute(self) -> dict[str, float]:
        """Return the counts."""
        return {"hits": self.hits, "odd": self.halves[1], **self.by_class}


class Appended:
    """Keeps outputs in a list that it makes with its first batch."""

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
        """Take in another rank's."""
        self.last = other.last

    def compute(self) -> int:
        """Return its size."""
        return len(self.last)


class Nested:
    """Is made of two metrics."""

    def __init__(self) -> None:
        self.first, self.others = Summed(), [Largest()]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        for metric in (self.first, *self.others):
            metric.update(outputs, targets)

    def compute(self) -> Tensor:
        """Return their difference."""
        return self.first.compute() - self.others[0].compute()


class Vector:
    """Computes a number for each class."""

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

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Return nothing."""


class Seen:
    """Keeps a set, which has no sum."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.seen |= set(outputs.flatten().tolist())

    def compute(self) -> int:
        """Return how many there are."""
        return len(self.seen)


class Growing:
    """Keeps a tensor that grows; it should be a list."""

    def __init__(self) -> None:
        self.scores = torch.zeros(0)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.scores = torch.cat([self.scores, outputs.flatten()])

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.scores.mean()


class Shortened:
    """Takes items out of a list."""

    def __init__(self) -> None:
        self.kept = [0.0, 1.0]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self.kept = self.kept[:1]

    def compute(self) -> float:
        """Return the sum."""
        return sum(self.kept)


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


def without_outputs(model: nn.Module, batch: Any) -> Step:
    """Return a loss and nothing for metrics."""
    return Step((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


def with_scalar(model: nn.Module, batch: Any) -> Step:
    """Return a scalar under the name of a metric."""
    outputs = model(batch[0])
    loss = (outputs - batch[1]).square().sum()
    return Step(loss, len(outputs), outputs, batch[1], scalars={"mae": loss.detach()})


class Demanding(Summed):
    """Cannot be computed from less than three samples; then it is a mapping."""

    def compute(self) -> Any:
        """Return the mean by a name."""
        if self.count < 3:
            raise ValueError("too few")
        return {"mean": float(self.total)}
