"""What a confusion matrix says about a classifier; used by ``train``.

Definitions: https://scikit-learn.org/stable/modules/model_evaluation.html#classification-metrics
"""

import torch
from torch import Tensor


def confusion_counts(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each class was taken for each, int64 (num_classes, num_classes).

    Args:
        outputs: scores (batch, num_classes), on any device.
        targets: classes (batch,), on the same device; they are the rows of the result.
        num_classes: how many classes there are.
    """
    pairs = targets * num_classes + outputs.argmax(dim=1)
    return torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def classification_metrics(counts: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of a whole set's confusion counts.

    Of two classes the second is the positive one; of more the unweighted mean over the classes
    counts (macro average). A class that never occurs, or is never predicted, counts as 0.
    """
    counts = counts.double()
    hits = counts.diagonal()
    precision = hits / counts.sum(dim=0).clamp(min=1)
    recall = hits / counts.sum(dim=1).clamp(min=1)
    f1 = 2 * hits / (counts.sum(dim=0) + counts.sum(dim=1)).clamp(min=1)
    is_binary = len(counts) == 2
    by_class = {"precision": precision, "recall": recall, "f1": f1}
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        **{key: float(value[1] if is_binary else value.mean()) for key, value in by_class.items()},
    }
