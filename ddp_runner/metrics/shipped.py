"""The shipped metrics: accuracy and others from confusion counts; means over samples or values.

Definitions: https://scikit-learn.org/stable/modules/model_evaluation.html#classification-metrics
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_runner.data.splits import IGNORED
from ddp_runner.device import sum_dtype
from ddp_runner.errors import UserError, counted
from ddp_runner.metrics.metric import summed


def confusion_counts(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each true class was predicted as each class, without waiting for a GPU.

    Outputs are scores (batch, num_classes or more, ...), targets are true classes (batch, ...). The
    counts, int64 (num_classes + 1, num_classes + 1), have a row per true class and a column per
    prediction. The last column counts predictions outside the classes: a model may have more
    outputs than the dataset has classes. The last row counts targets outside the classes (first
    cell) and targets of -100 (second cell).

    Raises:
        UserError: the outputs have no score for each target.
    """
    validate_scores(outputs, targets)
    size, targets = num_classes + 1, targets.long()
    cells = targets * size + outputs.argmax(dim=1).clamp(max=num_classes)
    cells = cells.where(~are_strays(targets, num_classes=num_classes), num_classes * size)
    cells = cells.where(targets != IGNORED, num_classes * size + 1).flatten()
    counts = cells.new_zeros(size * size).index_add_(0, cells, torch.ones_like(cells))
    return counts.view(size, size)


def are_strays(targets: Tensor, *, num_classes: int) -> Tensor:
    """Return a mask of the targets that are neither classes nor -100, bool (batch, ...)."""
    return (targets >= num_classes) | ((targets < 0) & (targets != IGNORED))


def reject_strays(count: Tensor | int, *, num_classes: int) -> None:
    """Raise a ``UserError`` if there were targets outside the classes."""
    if count:
        raise UserError(
            f"the evaluation has {counted(int(count), 'target')} outside the classes: {num_classes}"
            f" are numbered from 0 to {num_classes - 1}, and {IGNORED} does not count"
        )


def validate_scores(outputs: Tensor, targets: Tensor) -> None:
    """Raise a ``UserError`` unless outputs are (batch, classes, ...), targets (batch, ...)."""
    if (outputs.shape[0], *outputs.shape[2:]) != tuple(targets.shape):
        raise UserError(
            f"outputs {tuple(outputs.shape)} have no scores of classes for targets "
            f"{tuple(targets.shape)}",
            "return (batch, classes, ...) for targets (batch, ...)",
        )


def classification_metrics(counts: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of an evaluation set.

    With two classes the second is positive; with more, each metric is the unweighted mean over the
    classes (macro average). A class that never occurs or is never predicted scores 0. The counts
    are the class rows of ``confusion_counts``, summed over all batches and ranks.
    """
    hits = counts.diagonal().double()
    predicted, true = counts.sum(dim=0)[:-1], counts.sum(dim=1)  # per class
    precision = hits / predicted.clamp(min=1)
    recall = hits / true.clamp(min=1)
    f1 = 2 * hits / (predicted + true).clamp(min=1)
    is_binary = len(counts) == 2
    by_class = {"precision": precision, "recall": recall, "f1": f1}
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        **{key: float(value[1] if is_binary else value.mean()) for key, value in by_class.items()},
    }


class _Mean:
    higher_is_better = False
    merge = summed("total", "count")

    def __init__(self) -> None:
        self.total: Tensor | int = 0  # tensors once there is a batch: nothing waits for a GPU
        self.count: Tensor | int = 0

    def compute(self) -> float:
        """Return the mean; NaN without a sample."""
        return float(self.total) / float(self.count) if self.count else math.nan


class TopKAccuracy(_Mean):
    """The share of samples, or pixels, whose true class is among the k highest scores.

    Outputs (batch, classes, ...), targets (batch, ...). Targets of -100 do not count.
    """

    higher_is_better = True
    merge = summed("total", "count", "strays")

    def __init__(self, *, k: int) -> None:
        super().__init__()
        if k < 1:
            raise UserError(f"k ({k}) must be 1 or greater")
        self.k, self.num_classes = k, 0
        self.strays: Tensor | int = 0  # targets outside the classes

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the hits of a batch.

        Raises:
            UserError: there are fewer classes than k, or no score for each target.
        """
        validate_scores(outputs, targets)
        self.num_classes = outputs.shape[1]
        if self.num_classes < self.k:
            raise UserError(f"k ({self.k}) must be {self.num_classes} or less, the model's classes")
        highest = outputs.topk(self.k, dim=1).indices
        self.total += (highest == targets.unsqueeze(1)).sum()
        self.count += (targets != IGNORED).sum()
        self.strays += are_strays(targets, num_classes=self.num_classes).sum()

    def compute(self) -> float:
        """Return the share of hits; NaN without a sample.

        Raises:
            UserError: a target was not a class.
        """
        reject_strays(self.strays, num_classes=self.num_classes)
        return super().compute()


class Perplexity(_Mean):
    """The exponential of the mean cross-entropy per token. Targets of -100 do not count.

    Outputs are logits (batch, tokens, vocabulary), or (batch, vocabulary, tokens) as in torch's
    cross_entropy. Targets are (batch, tokens).
    """

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the cross-entropy of a batch; a ``UserError`` without logits for each token."""
        if outputs.shape[:-1] == targets.shape:
            outputs = outputs.movedim(-1, 1)
        validate_scores(outputs, targets)
        losses = F.cross_entropy(outputs.float(), targets, reduction="none")  # 0 where ignored
        self.total += losses.to(sum_dtype(losses.device)).sum()
        self.count += (targets != IGNORED).sum()

    def compute(self) -> float:
        """Return the perplexity, 1 or greater; NaN without a token."""
        return float(torch.tensor(super().compute(), dtype=torch.float64).exp())


class MAE(_Mean):
    """The mean absolute error over all values. Outputs and targets have the same shape."""

    _loss = staticmethod(torch.abs)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the errors of a batch; a ``UserError`` if the shapes differ."""
        if outputs.shape != targets.shape:  # torch would broadcast them
            raise UserError(
                f"a regression metric needs outputs and targets of the same shape, not "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}",
                "choose a dataset that fits",
            )
        dtype = sum_dtype(outputs.device)
        self.total += self._loss(outputs.to(dtype) - targets.to(dtype)).sum()
        self.count += targets.numel()


class RMSE(MAE):
    """The square root of the mean squared error over all values."""

    _loss = staticmethod(torch.square)

    def compute(self) -> float:
        """Return the root of the mean; NaN without a sample."""
        return math.sqrt(super().compute())
