"""Metrics of classifiers: of samples, of pixels, and of the tokens of a language model."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_runner.data.splits import IGNORED
from ddp_runner.device import sum_dtype
from ddp_runner.errors import UserError
from ddp_runner.metrics.confusion import are_strays, reject_strays, validate_scores
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
        return int(self.hits) / int(self.count) if self.count else float("nan")


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
        self.total += losses.to(sum_dtype(losses.device)).sum()
        self.count += (targets != IGNORED).sum()

    def compute(self) -> float:
        """Return the perplexity, 1 or greater; NaN without a token."""
        mean = float(self.total / self.count) if self.count else float("nan")
        return float(torch.tensor(mean, dtype=torch.float64).exp())
