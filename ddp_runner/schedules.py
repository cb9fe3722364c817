"""Learning-rate schedules, advanced once an optimizer step; the worker builds the named one.

Each is a closed formula of the step, so its state is the step alone: a run resumed with another
length or number of ranks follows the new formula, not a remembered one.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_runner.errors import UserError


def constant(optimizer: Optimizer, *, total_steps: int, steps_per_epoch: int) -> LambdaLR:
    """Return a schedule that keeps the optimizer's learning rate."""
    return LambdaLR(optimizer, lambda step: 1.0)


def cosine(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup_steps: int = 0,
    min_factor: float = 0.0,
) -> LambdaLR:
    """Return linear warm-up, then half a cosine (without restarts, arXiv:1608.03983).

    Args:
        optimizer: Its learning rates are the peak.
        total_steps: Optimizer steps of the whole run; the cosine ends there.
        steps_per_epoch: Not used.
        warmup_steps: Steps that climb to the peak; the first already takes a part of it.
        min_factor: Fraction of the peak at the end.

    Raises:
        UserError: If the warm-up does not fit in the run.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"scheduler.warmup_steps ({warmup_steps}) must be from 0 to the run's total steps "
            f"({total_steps}); shorten the warm-up or train longer"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)


def step(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    every_epochs: int,
    gamma: float,
) -> LambdaLR:
    """Return a schedule that multiplies the learning rate by ``gamma`` every few epochs.

    Args:
        optimizer: Its learning rates are those of the first epochs.
        total_steps: Not used.
        steps_per_epoch: Optimizer steps of an epoch.
        every_epochs: Epochs between two changes.
        gamma: Factor of each change.

    Raises:
        UserError: If ``every_epochs`` is not positive.
    """
    if every_epochs < 1:
        raise UserError(f"scheduler.every_epochs ({every_epochs}) must be 1 or more; use 1")
    period = every_epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: gamma ** (step // period))
