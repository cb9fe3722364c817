"""Metrics of classifiers: of samples, of pixels, and of the tokens of a language model."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_runner.data.splits import IGNORED
from ddp_runner.errors import UserError
from ddp_runner.metrics.confusion import (
    are_strays,
    confusion_counts,
    of_classes,
    reject_strays,
    validate_scores,
)
from ddp_runner.metrics.metric import summed


class TopKAccuracy:
    """The share of samples, or pixels, whose true class is among the k highest scores.

    Outputs (batch, classes, ...), targets (batch, ...). Targets of -100 do not count.
    """

    higher_is_better = True
    merge = summed("hits", "count", "strays")

    def __init__(self, *, k: int) -> None:
        if k < 1:
            raise UserError(f"k ({k}) must be 1 or greater")
        self.k, self.num_classes = k, 0
        self.hits: Tensor | int = 0  # tensors once there is a batch: nothing waits for a GPU
        self.count: Tensor | int = 0
        self.strays: Tensor | int = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the hits of a batch.

        Raises:
            UserError: there are fewer classes than k, or no score for each target.
        """
        validate_scores(outputs, targets)
        self.num_classes = outputs.shape[1]
        if outputs.shape[1] < self.k:
            raise UserError(f"k ({self.k}) must be {outputs.shape[1]} or less, the model's classes")
        highest = outputs.topk(self.k, dim=1).indices
        self.hits += (highest == targets.unsqueeze(1)).sum()
        self.count += (targets != IGNORED).sum()
        self.strays += are_strays(targets, num_classes=self.num_classes).sum()

    def compute(self) -> float:
        """Return the share of hits; NaN without a sample.

        Raises:
            UserError: a target was not a class.
        """
        reject_strays(self.strays, num_classes=self.num_classes)
        return float(self.hits / self.count) if self.count else float("nan")


class AUC:
    """The area under the ROC curve: how often a positive sample scores above a negative one.

    It is exact, ties count half, and it keeps the scores of all samples. Targets (batch,) are
    classes. Outputs are (batch,) or (batch, 1), scores of class 1; (batch, 2), logits; or
    (batch, classes), logits or log-probabilities: then it is the unweighted mean over the classes,
    each against the rest. A class of which no sample, or every sample, is true has no area and is
    left out of the mean. Targets of -100 do not count.
    """

    higher_is_better = True
    merge = summed("scores", "targets", "strays")

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.strays: Tensor | int = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep the scores of a batch.

        Raises:
            UserError: the outputs are no scores of samples.
        """
        if outputs.ndim == 1:
            outputs = outputs.unsqueeze(1)
        if outputs.ndim != 2 or len(outputs) != targets.numel():
            raise UserError(
                f"the area under the ROC curve needs a score for each sample and class, not "
                f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)}"
            )
        self.strays += are_strays(targets, num_classes=max(2, outputs.shape[1])).sum()
        scores = outputs.double()
        if scores.shape[1] == 2:
            scores = scores[:, 1:] - scores[:, :1]  # in the order of softmax, without its ties
        elif scores.shape[1] > 2:
            scores = scores.softmax(dim=1)
        self.scores.append(scores)
        self.targets.append(targets.flatten())

    def compute(self) -> float:
        """Return the area, from 0 to 1; NaN if it is defined for no class.

        Raises:
            UserError: a target was not a class.
        """
        if not self.scores:
            return float("nan")
        scores, targets = torch.cat(self.scores), torch.cat(self.targets)
        reject_strays(self.strays, num_classes=max(2, scores.shape[1]))
        scores, targets = scores[targets != IGNORED], targets[targets != IGNORED]
        classes = range(scores.shape[1]) if scores.shape[1] > 1 else [1]
        areas = [
            _area(column, targets == label)
            for label, column in zip(classes, scores.unbind(dim=1), strict=True)
            if 0 < int((targets == label).sum()) < len(targets)
        ]
        return sum(areas) / len(areas) if areas else float("nan")


def _area(scores: Tensor, is_positive: Tensor) -> float:
    """Return the area from the ranks of the positive samples (the Mann-Whitney U statistic).

    https://en.wikipedia.org/wiki/Mann-Whitney_U_test#Area-under-curve_(AUC)_statistic_for_ROC_curves

    Args:
        scores: (num_samples,).
        is_positive: bool (num_samples,), of both kinds.
    """
    _, places, sizes = scores.unique(return_inverse=True, return_counts=True)
    ends = sizes.cumsum(dim=0)
    ranks = (ends - (sizes - 1).double() / 2)[places]  # from 1; equal scores share their mean rank
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    wins = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(wins / (num_positive * num_negative))


class MeanIoU:
    """The mean over the classes of intersection over union, for a class of each pixel.

    Outputs (batch, classes, height, width), targets (batch, height, width); any other number of
    dimensions after the classes works, too. Targets of -100 do not count. It is the share of the
    pixels that both prediction and truth give a class, among those that either gives it. A class
    that neither has is left out.
    """

    higher_is_better = True
    merge = summed("counts")

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # see confusion_counts

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the pixels of a batch.

        Raises:
            UserError: see ``confusion_counts``.
        """
        counts = confusion_counts(outputs, targets, num_classes=outputs.shape[1])
        self.counts = counts if self.counts is None else self.counts + counts

    def compute(self) -> float:
        """Return the mean over the classes; NaN without a pixel.

        Raises:
            UserError: a target was not a class.
        """
        if self.counts is None:
            return float("nan")
        counts = of_classes(self.counts)
        shared = counts.diagonal().double()
        either = counts.sum(dim=1) + counts.sum(dim=0)[:-1] - shared
        occurs = either > 0
        return float((shared[occurs] / either[occurs]).mean())


class Perplexity:
    """The exponential of the mean cross-entropy of a token. Targets of -100 do not count.

    Outputs are logits (batch, tokens, vocabulary), or (batch, vocabulary, tokens) as torch's
    cross_entropy takes them. Targets are (batch, tokens).
    """

    higher_is_better = False
    merge = summed("total", "count")

    def __init__(self) -> None:
        self.total: Tensor | int = 0
        self.count: Tensor | int = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the cross-entropy of a batch.

        Raises:
            UserError: the outputs have no logits for each token.
        """
        if outputs.shape[:-1] == targets.shape:
            outputs = outputs.movedim(-1, 1)
        validate_scores(outputs, targets)
        losses = F.cross_entropy(outputs.float(), targets, reduction="none")  # 0 where ignored
        self.total += losses.double().sum()
        self.count += (targets != IGNORED).sum()

    def compute(self) -> float:
        """Return the perplexity, 1 or greater; NaN without a token."""
        mean = float(self.total / self.count) if self.count else float("nan")
        return float(torch.tensor(mean, dtype=torch.float64).exp())
