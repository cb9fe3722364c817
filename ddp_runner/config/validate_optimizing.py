"""What must hold for parameter groups, clipping and averaged weights. Torch-free.

What depends on the model's parameters or the optimizer's class is validated by a rank.
"""

from typing import Any

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError


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
    decay = config.ema.decay
    if decay is not None and not 0 <= decay < 1:
        raise UserError(f"ema.decay ({decay:g}) must be 0 or greater and less than 1; write 0.999")


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
