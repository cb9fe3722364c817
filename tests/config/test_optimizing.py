"""The keys about optimizing: what they may hold, before anything starts."""

from dataclasses import replace

import pytest
from configs import config_error, resolved

from ddp_runner.config.monitors import KnownMetrics, validate_monitors
from ddp_runner.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("train.clip_value=0.5", "train.clip_norm (1) and train.clip_value (0.5) exclude each "
         "other; write train.clip_norm=null or train.clip_value=null"),
        ("model=toy train.clip_value=0", "train.clip_value (0.0) must be greater than 0"),
        ("params.groups=[{lr:0.1}]", "params.groups.0 ({'lr': 0.1}) must have `match`, a pattern "
         "of parameter names, and keys of the optimizer; write "
         "params.groups=[{match:head.*,lr:0.01}]"),
        ("params.groups=[{match:a,lr:1},{match:head.*,lr:-1}]",
         "params.groups.1.lr (-1) must be greater than 0"),
        ("params.groups=[{match:head.*,weight_decay:much}]",
         "params.groups.0.weight_decay (much) must be a number"),
        ("ema.decay=1", "ema.decay (1.0) must be less than 1"),
        ("ema.decay=-0.1", "ema.decay (-0.1) must be 0 or greater"),
        ("early_stop.monitor=train/loss", "early_stop.monitor (train/loss) must be one of "
         "eval/accuracy, eval/loss, eval/f1, eval/precision, eval/recall; did you mean eval/loss?"),
        ("early_stop.monitor=eval/loss train.eval_every_epochs=0",
         "early_stop.monitor=eval/loss needs evaluations and train.eval_every_epochs is 0; write "
         "train.eval_every_epochs=1"),
        ("early_stop.monitor=eval/f1 early_stop.mode=min",
         "early_stop.monitor=eval/f1 with early_stop.mode=min keeps the worst value, not the "
         "best; write early_stop.mode=max"),
        ("early_stop.mode=least", "early_stop.mode (least) must be one of null, max, min"),
        ("early_stop.patience=0", "early_stop.patience (0) must be greater than 0"),
        ("early_stop.min_delta=-1", "early_stop.min_delta (-1.0) must be 0 or greater"),
        ("+scheduler.warmup_steps=-1", "scheduler.warmup_steps (-1) must be 0 or greater"),
        ("scheduler=step scheduler.every_epochs=0",
         "scheduler.every_epochs (0) must be greater than 0"),
        ("batch.per_rank=auto", "batch.per_rank (auto) must be a whole number"),
        ("batch.per_rank=1.5", "batch.per_rank (1.5) must be a whole number"),
        ("batch.per_rank=0", "batch.per_rank (0) must be greater than 0"),
    ],
)  # fmt: skip
def test_each_broken_rule_is_one_line(overrides: str, sentence: str) -> None:
    """Rule, values and fix, word for word."""
    assert config_error(*overrides.split()) == sentence


def test_early_stopping_needs_to_know_which_end_of_a_metric_is_best() -> None:
    """The metric's class may say so, else the user."""
    keys = (
        "+metrics.mine._target_=my.Mine",
        "allowed_targets=[my]",
        "early_stop.monitor=eval/mine",
    )
    config, _ = resolved(*keys)
    known = KnownMetrics(names={"eval/mine"})
    with pytest.raises(UserError, match=r"eval/mine does not say which value is best; write "):
        validate_monitors(config, known)
    validate_monitors(config, replace(known, directions={"eval/mine": "max"}))
    validate_monitors(resolved(*keys, "early_stop.mode=min")[0], known)
