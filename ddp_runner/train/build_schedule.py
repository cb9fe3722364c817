"""Builds the learning-rate schedule from its group: one of ours, of torch's, or of the user's."""

import inspect
from functools import partial

import torch

from ddp_runner.config.instantiate import complete, keywords, make
from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import UserError
from ddp_runner.train.schedules import Schedule, Scheduler


def build_schedule(
    config: RunConfig,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int | None,
    steps_per_epoch: int | None,
) -> Schedule:
    """Return the learning-rate schedule: one of ours, of torch's, or of the user's.

    A scheduler that takes ``total_steps``, as OneCycleLR does, or ``steps_per_epoch`` gets them.
    None: only the end of a stream will tell.

    Raises:
        UserError: a key of the group does not fit the scheduler, or it names a metric for a
            scheduler that takes none, or it needs the length of a stream.
    """
    settings = dict(config.scheduler)
    make_factory = partial(make, "scheduler", allowed=config.allowed_targets, partial=True)
    monitor = None
    taken = keywords(make_factory(settings))
    lengths = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    known = {name: length for name, length in lengths.items() if length is not None}
    unknown = sorted(taken & (lengths.keys() - known.keys() - settings.keys()))
    if unknown and not taken & known.keys():  # OneCycleLR, for one, needs only one of them
        fix = "write train.max_steps" if "total_steps" in unknown else "write scheduler=cosine"
        raise UserError(
            f"scheduler={settings.get('name')} needs {' and '.join(unknown)}, which a stream such "
            f"as dataset={config.dataset.get('name')} does not tell; {fix}"
        )
    if "monitor" not in taken:
        monitor = settings.pop("monitor", None)  # it is for the runner
    scheduler = complete(
        "scheduler",
        settings,
        make_factory(settings),
        optimizer,
        kind=Scheduler,
        **known,
    )
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
