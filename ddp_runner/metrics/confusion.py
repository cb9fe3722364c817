"""Confusion counts, and the metrics of every evaluation of a dataset with classes.

Definitions: https://scikit-learn.org/stable/modules/model_evaluation.html#classification-metrics
"""

import torch
from torch import Tensor

from ddp_runner.data.splits import IGNORED, validate_classes
from ddp_runner.errors import UserError


def confusion_counts(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each true class was predicted as each class.

    The last column counts predictions outside the classes: a model may have more outputs than the
    dataset has classes. Targets of -100 do not count.

    Args:
        outputs: scores (batch, num_classes or more, ...), on any device.
        targets: true classes (batch, ...), on the same device.
        num_classes: of the dataset.

    Returns:
        Counts, int64 (num_classes, num_classes + 1): a row per true class, a column per prediction.

    Raises:
        UserError: the outputs have no score for each target, or a target is not a class.
    """
    validate_scores(outputs, targets)
    validate_classes(targets, num_classes=num_classes)
    predicted = outputs.argmax(dim=1).clamp(max=num_classes)
    num_pairs = num_classes * (num_classes + 1)
    pairs = targets * (num_classes + 1) + predicted
    pairs = torch.where(targets == IGNORED, num_pairs, pairs)  # a mask makes a GPU wait
    counts = torch.bincount(pairs.flatten(), minlength=num_pairs + 1)
    return counts[:num_pairs].reshape(num_classes, num_classes + 1)


def validate_scores(outputs: Tensor, targets: Tensor) -> None:
    """Reject outputs that are not (batch, classes, ...) for targets (batch, ...).

    Raises:
        UserError: torch would broadcast them.
    """
    if (outputs.shape[0], *outputs.shape[2:]) != tuple(targets.shape):
        raise UserError(
            f"outputs {tuple(outputs.shape)} have no scores of classes for targets "
            f"{tuple(targets.shape)}; return (batch, classes, ...) for targets (batch, ...)"
        )


def classification_metrics(counts: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of an evaluation set.

    With two classes the second is the positive one; with more, each metric is the unweighted mean
    over the classes (macro average). A class that never occurs or is never predicted scores 0.

    Args:
        counts: from ``confusion_counts``, summed over all batches and ranks.
    """
    hits = counts.diagonal().double()
    predicted, true = counts.sum(dim=0)[:-1], counts.sum(dim=1)  # of each class
    precision = hits / predicted.clamp(min=1)
    recall = hits / true.clamp(min=1)
    f1 = 2 * hits / (predicted + true).clamp(min=1)
    is_binary = len(counts) == 2
    by_class = {"precision": precision, "recall": recall, "f1": f1}
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        **{key: float(value[1] if is_binary else value.mean()) for key, value in by_class.items()},
    }
