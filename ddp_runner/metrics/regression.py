"""Metrics of regressions. Outputs and targets have the same shape (batch, ...)."""

import math

from torch import Tensor

from ddp_runner.device import sum_dtype
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
        if outputs.shape != targets.shape:  # torch would broadcast them
            raise UserError(
                f"a metric of a regression needs outputs and targets of one shape, not "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}; choose a dataset that fits"
            )
        kind = sum_dtype(outputs.device)
        self.total += self._loss(outputs.to(kind) - targets.to(kind)).sum()
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
