"""Confusion counts, and the metrics computed from them for a dataset with classes.

Definitions: https://scikit-learn.org/stable/modules/model_evaluation.html#classification-metrics
"""

import torch
from torch import Tensor

from ddp_runner.data.splits import IGNORED
from ddp_runner.errors import UserError, counted


def confusion_counts(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each true class was predicted as each class, without waiting for a GPU.

    The last column counts predictions outside the classes: a model may have more outputs than the
    dataset has classes. The last row counts targets outside the classes (first cell) and targets of
    -100 (second cell).

    Args:
        outputs: scores (batch, num_classes or more, ...), on any device.
        targets: true classes (batch, ...), on the same device.
        num_classes: classes of the dataset.

    Returns:
        Counts, int64 (num_classes + 1, num_classes + 1): a row per true class, a column per
        prediction.

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
    classes (macro average). A class that never occurs or is never predicted scores 0.

    Args:
        counts: the class rows of ``confusion_counts``, summed over all batches and ranks.
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
