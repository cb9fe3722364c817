"""Metrics of segmentations: a class for each pixel. Targets of -100 do not count.

Outputs (batch, classes, height, width), targets (batch, height, width); any other number of
dimensions after the classes works, too.
"""

from torch import Tensor

from ddp_runner.metrics.confusion import confusion_counts


class MeanIoU:
    """The mean over the classes of intersection over union.

    It is the share of the pixels that both prediction and truth give a class, among those that
    either gives it. A class that neither has is left out.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # (classes, classes + 1), see confusion_counts

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the pixels of a batch.

        Raises:
            UserError: see ``confusion_counts``.
        """
        counts = confusion_counts(outputs, targets, num_classes=outputs.shape[1])
        self.counts = counts if self.counts is None else self.counts + counts

    def compute(self) -> float:
        """Return the mean over the classes; NaN without a pixel."""
        if self.counts is None:
            return float("nan")
        shared = self.counts.diagonal().double()
        either = self.counts.sum(dim=1) + self.counts.sum(dim=0)[:-1] - shared
        occurs = either > 0
        return float((shared[occurs] / either[occurs]).mean())


class PixelAccuracy:
    """The share of pixels whose class is predicted."""

    higher_is_better = True

    def __init__(self) -> None:
        self.hits = self.count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the pixels of a batch.

        Raises:
            UserError: see ``confusion_counts``.
        """
        counts = confusion_counts(outputs, targets, num_classes=outputs.shape[1])
        self.hits += int(counts.diagonal().sum())
        self.count += int(counts.sum())

    def compute(self) -> float:
        """Return the share; NaN without a pixel."""
        return self.hits / self.count if self.count else float("nan")
