"""Metrics of language models."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_runner.data.dataset import IGNORED
from ddp_runner.errors import UserError


class Perplexity:
    """The exponential of the mean cross-entropy of a token. Targets of -100 do not count.

    Outputs are logits (batch, tokens, vocabulary), or (batch, vocabulary, tokens) as torch's
    cross_entropy takes them. Targets are (batch, tokens).
    """

    higher_is_better = False

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the cross-entropy of a batch.

        Raises:
            UserError: the outputs have no logits for each token.
        """
        if outputs.shape[:-1] == targets.shape:
            outputs = outputs.movedim(-1, 1)
        elif (outputs.shape[0], *outputs.shape[2:]) != tuple(targets.shape):
            raise UserError(
                f"perplexity needs logits (batch, tokens, vocabulary), not outputs "
                f"{tuple(outputs.shape)} with targets {tuple(targets.shape)}"
            )
        losses = F.cross_entropy(outputs.float(), targets, reduction="none")  # 0 where ignored
        self.total += float(losses.double().sum())
        self.count += int((targets != IGNORED).sum())

    def compute(self) -> float:
        """Return the perplexity, 1 or greater; NaN without a token."""
        mean = self.total / self.count if self.count else float("nan")
        return float(torch.tensor(mean, dtype=torch.float64).exp())
