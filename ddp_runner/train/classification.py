"""What a confusion matrix says about a classifier; used by ``train``.

Definitions: https://scikit-learn.org/stable/modules/model_evaluation.html#classification-metrics
"""

import torch
from torch import Tensor


def confusion_counts(outputs: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each class was taken for each, int64 (num_classes, num_classes + 1).

    The last column counts what was taken for none of them: a model may have more outputs than the
    dataset has classes.

    Args:
        outputs: scores (batch, num_classes or more), on any device.
        targets: classes (batch,), on the same device; they are the rows of the result.
        num_classes: how many classes there are.
    """
    predicted = outputs.argmax(dim=1).clamp(max=num_classes)
    pairs = targets * (num_classes + 1) + predicted
    counts = torch.bincount(pairs, minlength=num_classes * (num_classes + 1))
    return counts.reshape(num_classes, num_classes + 1)


def classification_metrics(counts: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of a whole set's `confusion_counts`.

    Of two classes the second is the positive one; of more the unweighted mean over the classes
    counts (macro average). A class that never occurs, or is never predicted, counts as 0.
    """
    hits = counts.diagonal().double()
    taken, true = counts.sum(dim=0)[:-1], counts.sum(dim=1)  # of each class
    precision = hits / taken.clamp(min=1)
    recall = hits / true.clamp(min=1)
    f1 = 2 * hits / (taken + true).clamp(min=1)
    is_binary = len(counts) == 2
    by_class = {"precision": precision, "recall": recall, "f1": f1}
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        **{key: float(value[1] if is_binary else value.mean()) for key, value in by_class.items()},
    }
