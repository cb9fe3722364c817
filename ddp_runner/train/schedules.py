"""Learning-rate schedules; the worker builds the named one, or one of torch's as it is.

Each of ours is a closed formula of the step, so its state is the step alone: a run resumed with
another length or number of ranks follows the new formula, not a remembered one.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_runner.errors import UserError


@runtime_checkable
class Scheduler(Protocol):
    """What a run asks of a scheduler, torch's or the user's own, besides its ``step``."""

    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""


@dataclass(frozen=True)
class Schedule:
    """When a scheduler advances: at each optimizer step, or by a metric at each evaluation."""

    scheduler: Any  # a LRScheduler; torch types the step of those that take a metric otherwise
    monitor: str | None = None  # the metric, for schedulers such as ReduceLROnPlateau

    def step(self) -> None:
        """Take note of an optimizer step.

        Raises:
            UserError: the scheduler was made for fewer steps.
        """
        if self.monitor is not None:
            return
        try:
            self.scheduler.step()
        except ValueError as error:  # OneCycleLR beyond its end
            raise UserError(
                f"{type(self.scheduler).__name__}: {' '.join(str(error).split())}; a resumed run "
                "keeps its schedule: start anew for more steps"
            ) from error

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation, whose metrics are the same on all ranks."""
        if self.monitor is not None:
            self.scheduler.step(metrics[self.monitor])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], *, initial_rates: list[float]) -> None:
        """Go on from a state; the optimizer holds the rates that were saved with it.

        Args:
            state: as ``state_dict`` returned it.
            initial_rates: of each parameter group, as this run's config gives them. Where they
                differ from the saved ones, the rates and their bounds change in proportion.
        """
        self.scheduler.load_state_dict(state)
        groups = self.scheduler.optimizer.param_groups
        for index, (group, rate) in enumerate(zip(groups, initial_rates, strict=True)):
            ratio = rate / group["initial_lr"]
            if ratio == 1:
                continue
            for key in ("lr", "initial_lr", "max_lr", "min_lr"):
                if key in group:
                    group[key] *= ratio
            if hasattr(self.scheduler, "base_lrs"):
                self.scheduler.base_lrs[index] *= ratio


def follow(scheduler: LRScheduler, *, monitor: str | None) -> Schedule:
    """Return when a scheduler advances, which its own ``step`` tells: by a metric if it takes one.

    Args:
        scheduler: built, with its optimizer.
        monitor: the metric if the config names one.

    Raises:
        UserError: a metric is named, and the scheduler takes none.
    """
    for group in scheduler.optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # ReduceLROnPlateau does not note it
    parameters = list(inspect.signature(scheduler.step).parameters.values())
    if parameters and parameters[0].default is parameters[0].empty:
        return Schedule(scheduler, monitor=monitor or "eval/loss")
    if monitor is not None:
        raise UserError(
            f"scheduler.monitor ({monitor}): {type(scheduler).__name__} follows the steps and no "
            "metric; leave it out"
        )
    return Schedule(scheduler)


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
