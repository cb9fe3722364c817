"""Metrics of regressions. Outputs and targets have the same shape (batch, ...)."""

import math

import torch
from torch import Tensor

from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import summed


class MAE:
    """The mean absolute error over all values."""

    higher_is_better = False
    merge = summed("total", "count")

    def __init__(self) -> None:
        self.total: Tensor | int = 0  # a tensor once there is a batch: nothing waits for a GPU
        self.count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the errors of a batch.

        Raises:
            UserError: the shapes differ.
        """
        self.total += self._loss(_errors(outputs, targets)).sum()
        self.count += targets.numel()

    def compute(self) -> float:
        """Return the mean; NaN without a sample."""
        return float(self.total / self.count) if self.count else float("nan")

    def _loss(self, errors: Tensor) -> Tensor:
        return errors.abs()


class RMSE(MAE):
    """The square root of the mean squared error over all values."""

    def compute(self) -> float:
        """Return the root of the mean; NaN without a sample."""
        return math.sqrt(super().compute())

    def _loss(self, errors: Tensor) -> Tensor:
        return errors.square()


class R2:
    """The coefficient of determination, the unweighted mean over the outputs of a sample.

    1 is perfect, 0 is as good as the mean of the targets. An output whose targets are all equal
    counts 1 if it is exact, else 0, as in scikit-learn.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.count = 0
        # Of each output of a sample: squared errors, and the targets' mean and squared deviations.
        self.errors = self.mean = self.deviations = torch.zeros((), dtype=torch.float64)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch.

        Raises:
            UserError: the shapes differ.
        """
        batch, targets = R2(), targets.double()
        batch.count = len(targets)
        batch.errors = _errors(outputs, targets).square().sum(dim=0)
        batch.mean = targets.mean(dim=0)
        batch.deviations = (targets - batch.mean).square().sum(dim=0)
        self.merge(batch)

    def merge(self, other: "R2") -> None:
        """Take in what another object has: deviations from two means are no sum.

        https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm
        """
        count = self.count + other.count
        if not other.count:
            return
        shift = other.mean - self.mean
        self.errors = self.errors + other.errors
        self.deviations = self.deviations + other.deviations
        self.deviations += shift.square() * (self.count * other.count / count)
        self.mean = self.mean + shift * (other.count / count)
        self.count = count

    def compute(self) -> float:
        """Return the mean coefficient; NaN with fewer than two samples."""
        if self.count < 2:
            return float("nan")
        scores = 1 - self.errors / self.deviations
        constant = torch.where(self.errors == 0, 1.0, 0.0).double()
        return float(torch.where(self.deviations == 0, constant, scores).mean())


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs minus targets in float64; torch would broadcast shapes that differ."""
    if outputs.shape != targets.shape:
        raise UserError(
            f"a metric of a regression needs outputs and targets of one shape, not "
            f"{tuple(outputs.shape)} and {tuple(targets.shape)}; choose a dataset that fits"
        )
    return outputs.double() - targets.double()
