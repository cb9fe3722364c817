"""Confusion counts of a classifier, and the metrics that follow from them.

Definitions: https://scikit-learn.org/stable/modules/model_evaluation.html#classification-metrics
"""

import torch
from torch import Tensor


def confusion_counts(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each true class was predicted as each class.

    The last column counts predictions outside the classes: a model may have more outputs than the
    dataset has classes.

    Args:
        outputs: scores (batch, num_classes or more), on any device.
        targets: true classes (batch,), on the same device.
        num_classes: of the dataset.

    Returns:
        Counts, int64 (num_classes, num_classes + 1): a row per true class, a column per prediction.
    """
    predicted = outputs.argmax(dim=1).clamp(max=num_classes)
    pairs = targets * (num_classes + 1) + predicted
    counts = torch.bincount(pairs, minlength=num_classes * (num_classes + 1))
    return counts.reshape(num_classes, num_classes + 1)


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
