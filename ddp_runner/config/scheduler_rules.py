"""What must hold between the keys of a scheduler and the rest; called by ``rules``. Torch-free."""

import math

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.metric_names import MONITORS, is_lower_better


def validate_scheduler(config: Config) -> None:
    """Refuse a metric that no evaluation gives, and a warm-up longer than the run; batch resolved.

    Raises:
        UserError: a rule is broken.
    """
    settings = config.scheduler
    monitor, mode, warmup = (settings.get(key) for key in ("monitor", "mode", "warmup_steps"))
    if monitor is not None:
        known = tuple(name for name in MONITORS if name.startswith("eval/"))
        if monitor not in known:
            raise UserError(f"scheduler.monitor ({monitor}) must be one of {', '.join(known)}")
        if not config.train.eval_every_epochs:
            raise UserError(
                f"scheduler.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; "
                "write train.eval_every_epochs=1"
            )
        better = "min" if is_lower_better(monitor) else "max"
        if mode is not None and mode != better:
            raise UserError(
                f"scheduler.monitor={monitor} with scheduler.mode={mode} would lower the rate "
                f"while it improves; write scheduler.mode={better}"
            )
    steps = num_steps(config)
    if isinstance(warmup, int) and steps is not None and warmup > steps:
        raise UserError(
            f"scheduler.warmup_steps ({warmup}) must be from 0 to the run's total steps ({steps}); "
            "shorten the warm-up or train longer"
        )


def num_steps(config: Config) -> int | None:
    """Return the optimizer steps of the whole run, None where only the data tell."""
    samples, size = config.dataset.get("num_samples"), config.batch.global_size
    if config.train.max_steps is not None:
        return config.train.max_steps
    if not isinstance(samples, int) or not size:
        return None
    return config.train.epochs * math.ceil(samples / size)
