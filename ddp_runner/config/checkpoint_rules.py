"""What must hold between the keys of checkpoints and of the weights a run starts from.

Called by ``rules``, hence torch-free.
"""

import difflib
from collections.abc import Collection

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.metric_names import MONITORS, is_lower_better


def validate_checkpoints(config: Config, *, chosen: Collection[str]) -> None:
    """Refuse a metric that no checkpoint will have, and starting weights for a resumed run.

    Args:
        config: as composed.
        chosen: the keys given on the command line.

    Raises:
        UserError: a rule is broken.
    """
    for name in ("every_epochs", "every_steps", "keep"):
        value = getattr(config.checkpoint, name)
        if value is not None and not value > 0:
            raise UserError(f"checkpoint.{name} ({value}) must be greater than 0")
    _validate_monitor(config)
    if config.resume is not None and "model.weights" in chosen:
        raise UserError(
            f"resume={config.resume} goes on with that run's own weights; leave model.weights "
            "out, or start a run of its own without resume"
        )


def _validate_monitor(config: Config) -> None:
    checkpoint = config.checkpoint
    monitor = checkpoint.monitor
    if checkpoint.mode not in ("max", "min"):
        raise UserError(f"checkpoint.mode ({checkpoint.mode}) must be one of max, min")
    if monitor is None:
        if checkpoint.load_best:
            raise UserError(
                "checkpoint.load_best=true needs checkpoint.monitor, the metric that tells which "
                "is best; write checkpoint.monitor=eval/accuracy"
            )
        return
    if monitor not in MONITORS:
        matches = difflib.get_close_matches(monitor, MONITORS, n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise UserError(
            f"checkpoint.monitor ({monitor}) must be one of {', '.join(MONITORS)}{hint}"
        )
    if is_lower_better(monitor) and checkpoint.mode == "max":
        raise UserError(
            f"checkpoint.monitor={monitor} with checkpoint.mode=max would keep the worst; write "
            "checkpoint.mode=min"
        )
    if monitor.startswith("eval/") and not config.train.eval_every_epochs:
        raise UserError(
            f"checkpoint.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; "
            "write train.eval_every_epochs=1"
        )
