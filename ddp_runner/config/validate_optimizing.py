"""What must hold for parameter groups, clipping, averaged weights and early stopping. Torch-free.

What depends on the model's parameters or the optimizer's class is validated by a rank.
"""

from typing import Any

from ddp_runner.config.schema import AUTO, Config, mode_needs
from ddp_runner.errors import UserError
from ddp_runner.metric_names import MONITORS, is_lower_better


def validate_optimizing(config: Config) -> None:
    """Reject keys about optimizing that do not fit each other.

    Raises:
        UserError: a rule is broken.
    """
    train = config.train
    if train.clip_norm is not None and train.clip_value is not None:
        raise UserError(
            f"train.clip_norm ({train.clip_norm:g}) and train.clip_value ({train.clip_value:g}) "
            "exclude each other; write train.clip_norm=null or train.clip_value=null"
        )
    for index, group in enumerate(config.params.groups):
        _validate_group(f"params.groups.{index}", group)
    decay, settings = config.ema.decay, config.early_stop
    if decay is not None and not 0 <= decay < 1:
        raise UserError(f"ema.decay ({decay:g}) must be 0 or greater and less than 1; write 0.999")
    if settings.monitor is not None:
        worse = "stop the run while it improves"
        validate_monitored(config, "early_stop", mode=settings.mode, worse=worse)


def validate_auto_batch(config: Config) -> None:
    """Reject batch.per_rank=auto in a resolved config whose ranks cannot measure it.

    Raises:
        UserError: a rule is broken.
    """
    if config.batch.per_rank != AUTO:
        return
    fix = "write a number, such as batch.per_rank=100"
    if config.task != "train":
        raise UserError(f"batch.per_rank=auto is for task=train, not {config.task}; {fix}")
    if config.backend.device == "cpu":
        raise UserError(
            f"batch.per_rank=auto fills a GPU's memory, and the run computes on the CPU; {fix}"
        )
    if mode_needs(config.parallelism).num_servers:
        name = config.parallelism.get("name")
        raise UserError(
            f"batch.per_rank=auto needs ranks that all train, not parallelism={name}; {fix}"
        )


def validate_monitored(config: Config, group: str, *, mode: str | None, worse: str) -> None:
    """Reject a metric that no evaluation gives, and a mode that takes its worst for the best.

    Args:
        config: composed or resolved.
        group: the group of keys, which has a key `monitor`.
        mode: of that group: max, min, or None for the metric's own direction.
        worse: what the wrong mode would do, for the message.

    Raises:
        UserError: a rule is broken.
    """
    keys: Any = getattr(config, group)
    monitor = keys.get("monitor") if isinstance(keys, dict) else keys.monitor
    known = [name for name in MONITORS if name.startswith("eval/")]
    if monitor not in known:
        raise UserError(f"{group}.monitor ({monitor}) must be one of {', '.join(known)}")
    validate_evaluations(config, group, monitor)
    better = "min" if is_lower_better(monitor) else "max"
    if mode is not None and mode != better:
        raise UserError(
            f"{group}.monitor={monitor} with {group}.mode={mode} would {worse}; write "
            f"{group}.mode={better}"
        )


def validate_evaluations(config: Config, group: str, monitor: str) -> None:
    """Reject a monitored metric of evaluations that never happen.

    Raises:
        UserError: evaluations are off.
    """
    if not config.train.eval_every_epochs:
        raise UserError(
            f"{group}.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; write "
            "train.eval_every_epochs=1"
        )


def _validate_group(key: str, group: dict[str, Any]) -> None:
    pattern, others = group.get("match"), [name for name in group if name != "match"]
    if not isinstance(pattern, str) or not pattern:
        raise UserError(
            f"{key}.match ({pattern}) must be a pattern of parameter names; write "
            "params.groups=[{match:head.*,lr:0.01}]"
        )
    if not others:
        raise UserError(
            f"{key} (match: {pattern}) changes no key of the optimizer; add one, such as lr, or "
            "leave the group out"
        )
    if "params" in others:
        raise UserError(f"{key}.params is filled by the pattern {key}.match; leave it out")
