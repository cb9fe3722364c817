"""Learning-rate schedules: ours, how any is built from its group, and when they advance.

Each of our schedules is a function of the step, so its only state is the step: a run resumed with
another length or number of ranks follows the new function.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR

from ddp_runner.config.instantiate import find, keywords, make
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.signatures import ANY
from ddp_runner.errors import UserError, one_line

# What schedulers call the optimizer steps of the whole run: ours and OneCycleLR, CosineAnnealingLR,
# those of Hugging Face, and others.
TOTAL_STEPS = ("total_steps", "T_max", "num_training_steps", "num_steps", "max_steps", "max_iters")


@runtime_checkable
class Scheduler(Protocol):
    """What a run needs of a scheduler, besides its ``step``."""

    optimizer: Optimizer
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Schedule:
    """When a scheduler advances: at each optimizer step, or by a metric at each evaluation."""

    scheduler: Any  # an LRScheduler; Any, since the types of step differ between schedulers
    monitor: str | None = None  # the metric, for schedulers such as ReduceLROnPlateau

    def step(self) -> None:
        """Advance after an optimizer step, unless the schedule follows a metric.

        Raises:
            UserError: the scheduler was built for fewer steps.
        """
        if self.monitor is not None:
            return
        try:
            self.scheduler.step()
        except ValueError as error:  # OneCycleLR past its end
            raise UserError(
                f"{type(self.scheduler).__name__}: {one_line(error)}; give the scheduler all steps "
                "of the run, or start anew, since a resumed run keeps its schedule"
            ) from error

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Advance by an evaluation's metrics, which must be the same on all ranks."""
        if self.monitor is not None:
            self.scheduler.step(metrics[self.monitor])


def build_schedule(
    config: RunConfig,
    optimizer: Optimizer,
    *,
    total_steps: int | None,
    steps_per_epoch: int | None,
) -> Schedule:
    """Return the learning-rate schedule: one of ours, of torch's, or of the user's.

    A scheduler that takes the steps of the run, under one of the names of TOTAL_STEPS, or
    ``steps_per_epoch`` gets them, unless the config gives them. None: only the end of a stream will
    tell.

    Raises:
        UserError: a key of the group does not fit the scheduler, or it names a metric for a
            scheduler that takes none, or it needs the length of a stream.
    """
    lengths = dict.fromkeys(TOTAL_STEPS, total_steps) | {"steps_per_epoch": steps_per_epoch}
    settings = {
        key: one for key, one in config.scheduler.items() if one is not None or key not in lengths
    }
    monitor = settings.pop("monitor", None)
    allowed = config.allowed_targets
    taken = keywords(find(settings["_target_"], key="scheduler._target_", allowed=allowed))
    lengths = {name: length for name, length in lengths.items() if name not in settings}
    offered = {name: length for name, length in lengths.items() if length is not None}
    unknown = sorted(taken & (lengths.keys() - offered.keys()))
    if unknown and not taken & offered.keys():  # OneCycleLR, for one, needs only one of them
        fix = "write train.max_steps" if {*unknown} & {*TOTAL_STEPS} else "write scheduler=cosine"
        raise UserError(
            f"scheduler={settings.get('name')} needs {' and '.join(unknown)}, which a stream such "
            f"as dataset={config.dataset.get('name')} does not tell; {fix}"
        )
    if monitor is not None and "monitor" in taken:  # else it is for the runner
        offered["monitor"], monitor = monitor, None
    given: Any = {name: value for name, value in offered.items() if taken & {name, ANY}}
    scheduler = make("scheduler", settings, optimizer, kind=Scheduler, allowed=allowed, **given)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # ReduceLROnPlateau does not set it
    arguments = list(inspect.signature(scheduler.step).parameters.values())
    if arguments and arguments[0].default is inspect.Parameter.empty:  # a metric
        return Schedule(scheduler, monitor=monitor or "eval/loss")
    if monitor is not None:
        raise UserError(
            f"scheduler.monitor ({monitor}): {type(scheduler).__name__} counts steps and takes no "
            "metric; leave it out"
        )
    return Schedule(scheduler)


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """Return a schedule that keeps the learning rate, after ``warmup_steps`` that climb to it."""
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def cosine(
    optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, min_factor: float = 0.0
) -> LambdaLR:
    """Return a linear warm-up followed by half a cosine (arXiv:1608.03983, without restarts).

    Args:
        optimizer: its learning rates are the peak.
        total_steps: optimizer steps until the cosine ends; by default those of the whole run.
        warmup_steps: steps that climb to the peak; the first one starts above zero.
        min_factor: fraction of the peak at the end.

    Raises:
        UserError: the warm-up does not fit in the run.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"scheduler.warmup_steps ({warmup_steps}) must be from 0 to the run's total steps "
            f"({total_steps}); shorten the warm-up or train longer"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)


def step(
    optimizer: Optimizer,
    *,
    steps_per_epoch: int,
    every_epochs: int,
    gamma: float,
    warmup_steps: int = 0,
) -> LambdaLR:
    """Return a schedule that multiplies the learning rate by ``gamma`` every few epochs.

    Args:
        optimizer: its learning rates apply until the first change.
        steps_per_epoch: optimizer steps of an epoch.
        every_epochs: epochs between two changes.
        gamma: factor of each change.
        warmup_steps: steps that climb to the learning rate; the epochs count from the first step.

    Raises:
        UserError: ``every_epochs`` is not positive.
    """
    if every_epochs < 1:
        raise UserError(f"scheduler.every_epochs ({every_epochs}) must be 1 or more; use 1")
    period = every_epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps) * gamma ** (step // period))


def sequential(
    optimizer: Optimizer,
    *,
    schedulers: Sequence[Callable[[Optimizer], LRScheduler]],
    milestones: Sequence[int],
) -> SequentialLR:
    """Return torch's ``SequentialLR`` of schedulers that a config gives with ``_partial_: true``.

    Args:
        optimizer: of the run.
        schedulers: functions of the optimizer, in their order.
        milestones: the optimizer steps at which the second and each further one begins.
    """
    return SequentialLR(optimizer, [build(optimizer) for build in schedulers], list(milestones))


def chained(
    optimizer: Optimizer, *, schedulers: Sequence[Callable[[Optimizer], LRScheduler]]
) -> ChainedScheduler:
    """Return torch's ``ChainedScheduler``: all schedulers change the learning rate in each step.

    Args:
        optimizer: of the run.
        schedulers: functions of the optimizer, given with ``_partial_: true``.
    """
    return ChainedScheduler([build(optimizer) for build in schedulers], optimizer=optimizer)


def _warmup(step: int, warmup_steps: int) -> float:
    """Return the factor of a step: it climbs in equal parts, and its first value is above zero."""
    return min(1.0, (step + 1) / (warmup_steps + 1))
