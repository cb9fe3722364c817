"""Losses summed over the samples of a batch; the training loop divides by the global count.

Sums can be added over micro-batches and ranks of different sizes; means of means cannot.
"""

import math

from torch import Tensor
from torch.nn import functional as F

from ddp_runner.errors import UserError


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of logits (batch, classes) and classes (batch,)."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of a language model, summed over the tokens.

    Use it with batch.count=tokens. Outputs are logits (batch, length, vocabulary), targets are
    tokens, int64 (batch, length), of which -100 does not count.

    Raises:
        UserError: the shapes do not match.
    """
    if outputs.shape[:-1] != targets.shape:
        raise UserError(
            f"token_cross_entropy needs logits (batch, length, vocabulary) and targets (batch, "
            f"length), not {tuple(outputs.shape)} and {tuple(targets.shape)}",
            "choose a dataset or a loss that fits the model",
        )
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")


def nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of log-probabilities (batch, classes) and classes (batch,)."""
    return F.nll_loss(outputs, targets, reduction="sum")


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of each sample (batch, ...), summed over the samples.

    Raises:
        UserError: the shapes differ; torch would broadcast them.
    """
    if outputs.shape != targets.shape:
        raise UserError(
            f"mse needs outputs and targets of the same shape, not {tuple(outputs.shape)} and "
            f"{tuple(targets.shape)}",
            "choose a dataset or a loss that fits the model",
        )
    return F.mse_loss(outputs, targets, reduction="sum") / math.prod(outputs.shape[1:])
