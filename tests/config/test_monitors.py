"""A monitored metric exists, and its best value is not kept out."""

import pytest
from configs import config_error, resolved

from ddp_runner.config.monitors import KnownMetrics, validate_monitors
from ddp_runner.errors import UserError

METRICS = "metrics=[top_k,mae]"
OWN_STEP = ("train.step=my_package.step", "allowed_targets=[my_package]")


@pytest.mark.parametrize(
    "overrides",
    [
        (METRICS, "checkpoint.monitor=eval/top_k"),
        (METRICS, "checkpoint.monitor=eval/mae_3", "checkpoint.mode=min"),
        (METRICS, "scheduler=plateau", "scheduler.monitor=eval/top_k", "scheduler.mode=max"),
        (*OWN_STEP, "checkpoint.monitor=eval/anything"),
        (*OWN_STEP, "checkpoint.monitor=train/anything", "checkpoint.mode=min"),
        (*OWN_STEP, "scheduler=plateau", "scheduler.monitor=eval/anything"),
        (*OWN_STEP, "sweep.objective=eval/anything"),
        (METRICS, "sweep.objective=best/mae_3"),
        ("sweep.objective=perf/peak_memory_gib",),
    ],
)
def test_own_metrics_may_be_monitored(overrides: tuple[str, ...]) -> None:
    """The launcher accepts what a rank will know."""
    resolved(*overrides)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((METRICS, "checkpoint.monitor=eval/topk"), "did you mean eval/top_k?"),
        ((METRICS, "checkpoint.monitor=eval/top_kk"), "did you mean eval/top_k?"),
        (("checkpoint.monitor=eval/top_k",), "checkpoint.monitor (eval/top_k) must be one of"),
        ((METRICS, "scheduler=plateau", "scheduler.monitor=train/mae"), "must be one of eval/"),
        ((*OWN_STEP, "scheduler=plateau", "scheduler.monitor=train/x"), "must be one of eval/"),
        ((METRICS, "checkpoint.monitor=eval/top_k", "train.eval_every_epochs=0"),
         "needs evaluations"),
        (("sweep.objective=eval/acc",), "did you mean eval/accuracy?"),
        (("sweep.objective=eval/loss", "train.eval_every_epochs=0"),
         "sweep.objective=eval/loss needs evaluations"),
        ((METRICS, "sweep.objective=eval/topk"), "did you mean eval/top_k?"),
        (("checkpoint.monitor=eval/loss",), "not the best; write checkpoint.mode=min"),
        (("checkpoint.monitor=eval/f1", "checkpoint.mode=min"), "write checkpoint.mode=max"),
    ],
)  # fmt: skip
def test_what_no_run_of_this_config_has_is_an_error(
    overrides: tuple[str, ...], sentence: str
) -> None:
    """At once, before torch is imported."""
    assert sentence in config_error(*overrides)


KNOWN = KnownMetrics(
    names={"eval/loss", "eval/mae", "eval/recall_cat"},
    unknown={"late"},
    directions={"eval/mae": "min", "eval/recall": "max"},
)


@pytest.mark.parametrize(
    ("monitor", "mode", "sentence"),
    [
        ("eval/mae", "min", None),
        ("eval/mae", "max", "checkpoint.monitor=eval/mae with checkpoint.mode=max keeps the "
         "worst value, not the best; write checkpoint.mode=min"),
        ("eval/recall_cat", "max", None),
        ("eval/recall_cat", "min", "write checkpoint.mode=max"),
        ("eval/recall_dog", "max", "checkpoint.monitor (eval/recall_dog) must be one of eval/loss, "
         "train/loss, perf/samples_per_s, perf/step_time_ms, train/lr, eval/mae, "),
        ("eval/late_any", "min", None),
        ("perf/samples_per_s", "max", None),
        ("eval/f1", "max", "checkpoint.monitor (eval/f1) must be one of eval/loss, "),
    ],
)  # fmt: skip
def test_a_rank_knows_what_the_run_will_have(monitor: str, mode: str, sentence: str | None) -> None:
    """From two samples; what cannot be computed from two is left alone."""
    keys = (f"checkpoint.monitor={monitor}", f"checkpoint.mode={mode}", *OWN_STEP)
    config, _ = resolved(*keys)
    if sentence is None:
        validate_monitors(config, KNOWN)
    else:
        with pytest.raises(UserError) as error:
            validate_monitors(config, KNOWN)
        assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("+metrics.mine.k=3",),
         "metrics.mine has no _target_, the class of the metric; write metrics=[mine] if it has "
         "a YAML, or +metrics.mine._target_=my_package.Mine"),
        (("+metrics.mine=3",), "metrics.mine has no _target_"),
        (("+metrics.accuracy._target_=ddp_runner.metrics.shipped.MAE",),
         "metrics.accuracy: eval/accuracy is a metric of every evaluation; give yours another "
         "name, such as metrics.own_accuracy"),
        (("+metrics.my-own._target_=ddp_runner.metrics.shipped.MAE",),
         "metrics.my-own: a metric is named by letters, digits and _, like metrics.mine"),
        (("+metrics.mine._target_=ddp_runner.metrics.shipped.RNSE",),
         "did you mean ddp_runner.metrics.shipped.RMSE?"),
        (("metrics=aoc",), "metrics=aoc does not exist; did you mean auc?"),
        (("metrics=[{_target_:my_package.Mine}]",),
         "a group must be given the name of an option; see --help for the options"),
        (("metrics={mine:{_target_:my_package.Mine}}",),
         "metrics takes no such override; write metrics=VALUE, or +metrics.KEY=VALUE"),
        (("metrics=[auc,aoc]",), "metrics=aoc does not exist; did you mean auc?"),
        (("metrics=auc",), "metrics.auc.num_classes has no value; write metrics.auc.num_classes="),
    ],
)  # fmt: skip
def test_a_wrong_metric_is_one_line(overrides: tuple[str, ...], sentence: str) -> None:
    """The line has the name to write instead."""
    assert sentence in config_error(*overrides)


def test_torchmetrics_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the extra that brings it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    target = "+metrics.mine._target_=torchmetrics.classification.MulticlassRecall"
    for words, metric in (
        ((target, "allowed_targets=[torchmetrics]"),
         "mine._target_ (torchmetrics.classification.MulticlassRecall)"),
        (("metrics=r2",), "r2._target_ (torchmetrics.regression.R2Score)"),
    ):  # fmt: skip
        assert config_error(*words) == (
            f"metrics.{metric} needs torchmetrics, which is not installed; "
            "pip install 'ddp-runner[metrics]'"
        )
