"""Builds the learning-rate schedule of a run, and defines schedules of its own.

The schedules defined here depend on the step alone: a run that is resumed with another length or
number of ranks follows the new function, whose rate ``snapshot`` sets.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR

from ddp_runner.checkpoint.optimizer_state import Scheduler
from ddp_runner.config.instantiate import find, keywords, make
from ddp_runner.config.rules import validate_warmup
from ddp_runner.config.schema import TOTAL_STEPS, RunConfig
from ddp_runner.config.signatures import ANY
from ddp_runner.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """When a scheduler advances: at each optimizer step, or by a metric at each evaluation."""

    scheduler: Scheduler
    monitor: str | None = None  # the metric, for schedulers such as ReduceLROnPlateau

    def step(self) -> None:
        """Advance after an optimizer step, unless the schedule follows a metric."""
        if self.monitor is None:
            self.scheduler.step()

    def step_on_metrics(self, metrics: Mapping[str, float]) -> None:
        """Advance after an evaluation, by metrics that are the same on all ranks."""
        if self.monitor is not None:
            self.scheduler.step(metrics[self.monitor])


def build_schedule(
    config: RunConfig, optimizer: Optimizer, *, total_steps: int | None, steps_per_epoch: int | None
) -> Schedule:
    """Return the learning-rate schedule: ours, torch's or the user's.

    A scheduler with a parameter of TOTAL_STEPS, or ``steps_per_epoch``, gets the run's number,
    unless the config sets it. Both numbers are None for a stream of unknown length.

    Raises:
        UserError: a key of the group does not fit the scheduler, it monitors a metric with a
            scheduler that counts steps, or it needs the length of a stream.
    """
    lengths = dict.fromkeys(TOTAL_STEPS, total_steps) | {"steps_per_epoch": steps_per_epoch}
    lengths = {name: count for name, count in lengths.items() if config.scheduler.get(name) is None}
    settings = {key: value for key, value in config.scheduler.items() if key not in lengths}
    monitor = settings.pop("monitor", None)
    allowed = config.allowed_targets
    accepted = keywords(find(settings["_target_"], key="scheduler._target_", allowed=allowed))
    arguments: dict[str, Any] = _known_lengths(config, lengths, accepted)
    if monitor is not None and "monitor" in accepted:  # a parameter of the scheduler itself
        arguments["monitor"], monitor = monitor, None
    scheduler = make("scheduler", settings, optimizer, kind=Scheduler, allowed=allowed, **arguments)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # ReduceLROnPlateau does not set it
    parameters = list(inspect.signature(scheduler.step).parameters.values())
    if parameters and parameters[0].default is inspect.Parameter.empty:  # a metric
        return Schedule(scheduler, monitor=monitor or "eval/loss")
    if monitor is not None:
        raise UserError(
            f"scheduler.monitor ({monitor}): {type(scheduler).__name__} counts steps and takes no "
            "metric",
            "leave it out",
        )
    return Schedule(scheduler)


def _known_lengths(
    config: RunConfig, lengths: Mapping[str, int | None], accepted: Set[str]
) -> dict[str, int]:
    """Return the lengths that a scheduler accepts; a stream's lengths are None."""
    known = {name: length for name, length in lengths.items() if length is not None}
    unknown = sorted(accepted & (lengths.keys() - known.keys()))
    if unknown and not accepted & known.keys():  # OneCycleLR needs only one of its two lengths
        fix = "write train.max_steps" if {*unknown} & {*TOTAL_STEPS} else "write scheduler=cosine"
        raise UserError(
            f"scheduler={config.scheduler.get('name')} needs {' and '.join(unknown)}, which is "
            f"unknown for a stream such as dataset={config.dataset.get('name')}",
            fix,
        )
    return {name: length for name, length in known.items() if accepted & {name, ANY}}


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """Return a constant learning rate after a linear warm-up."""
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def cosine(
    optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, min_factor: float = 0.0
) -> LambdaLR:
    """Return a linear warm-up followed by half a cosine (arXiv:1608.03983, without restarts).

    The warm-up climbs from above zero to the optimizer's learning rates, the peak; `min_factor` is
    the fraction of it at the end. The `total_steps` include the warm-up; by default they are all
    steps of the run.

    Raises:
        UserError: the warm-up does not fit in the run.
    """
    validate_warmup(warmup_steps, total_steps=total_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)


def step_decay(
    optimizer: Optimizer,
    *,
    steps_per_epoch: int,
    every_epochs: int,
    gamma: float,
    warmup_steps: int = 0,
) -> LambdaLR:
    """Return a schedule that multiplies the learning rate by ``gamma`` every few epochs.

    `gamma` is the factor of a change, and `every_epochs` the epochs between two; they count from
    the first step of the warm-up.
    """
    period = every_epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps) * gamma ** (step // period))


def sequential(
    optimizer: Optimizer,
    *,
    schedulers: Sequence[Callable[[Optimizer], LRScheduler]],
    milestones: Sequence[int],
) -> SequentialLR:
    """Return torch's ``SequentialLR``: the schedulers follow each other.

    In a config the `schedulers` have ``_partial_: true``. The `milestones` are the optimizer steps
    at which the second and each later scheduler begins.
    """
    return SequentialLR(optimizer, [build(optimizer) for build in schedulers], list(milestones))


def chained(
    optimizer: Optimizer, *, schedulers: Sequence[Callable[[Optimizer], LRScheduler]]
) -> ChainedScheduler:
    """Return torch's ``ChainedScheduler``: every scheduler changes the learning rate in each step.

    In a config the `schedulers` have ``_partial_: true``.
    """
    return ChainedScheduler([build(optimizer) for build in schedulers], optimizer=optimizer)


def _warmup(step: int, warmup_steps: int) -> float:
    """Return the factor of a step: it climbs linearly, from above zero."""
    return min(1.0, (step + 1) / (warmup_steps + 1))
