"""Configured metrics in the loop: every rank count gives the same, and mistakes show up early."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import only
from train_states import TOY, Trace, build, compose_config, evaluated, run_loop

from ddp_runner.config.monitors import validate_monitors
from ddp_runner.config.schema import Config
from ddp_runner.data.splits import MicroPlan
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.first_batch import try_evaluation

OWN = "allowed_targets=[own_metrics]"
SUMMED = "+metrics.mine._target_=own_metrics.Summed"
APPENDED = "+metrics.appended._target_=own_metrics.Appended"
LARGEST = "+metrics.largest._target_=own_metrics.Largest"
DIGITS = ("model=mnist_net", "dataset=fake_images", "dataset.num_samples=20")
PICTURES = (
    "model=toy",
    "model._target_=own_metrics.segmenter",
    "~model.num_stages",
    "model.loss=ddp_runner.train.losses.cross_entropy",
    "dataset=torch_dataset",
    "dataset.train={_target_:own_metrics.Pictures,size:12}",
    "dataset.eval={_target_:own_metrics.Pictures,size:11}",
    "batch.eval_per_rank=3",
    "metrics=[iou,pixel_accuracy]",
    "metrics.iou.num_classes=2",
    OWN,
)


def evaluated_twice(env: DistEnv, config: Config) -> dict[str, float]:
    """Return an evaluation of the model before training; two give the same."""
    state = build(env, config)
    results, again = evaluated(state)[0], evaluated(state)[0]
    assert results == again
    return results


@pytest.mark.parametrize(
    "keys",
    [
        (
            *DIGITS,
            "dataset.eval_samples=37",
            "metrics=[top_k,perplexity]",
            SUMMED,
            APPENDED,
            LARGEST,
            OWN,
        ),
        (*DIGITS, "dataset.eval_samples=2", "metrics=top_k", APPENDED, OWN),
        (*TOY, "batch.global_size=6", "dataset.eval_samples=2", "metrics=[mae,rmse]"),
    ],
    ids=["many samples", "two samples", "two samples of a regression"],
)
def test_every_number_of_ranks_gives_the_same(keys: tuple[str, ...]) -> None:
    """With two samples, one of three ranks gets none."""
    (alone,) = run_ranks(evaluated_twice, 1, compose_config(*keys))
    assert len([name for name in alone if name not in ("eval/loss", "eval/accuracy")]) >= 2
    for found in run_ranks(evaluated_twice, 3, compose_config(*keys, world_size=3)):
        assert found == pytest.approx(alone, rel=1e-5, nan_ok=True)


def segmented(env: DistEnv, config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return an evaluation of pixels, and the same figures from scikit-learn."""
    from sklearn.metrics import accuracy_score, jaccard_score  # seconds for every other test's rank

    state = build(env, config)
    split = state.work.dataset.eval
    pictures = [next(iter(split.load([piece], seed=0))) for piece in pieces(len(split))]
    inputs, targets = (torch.cat(part) for part in zip(*pictures, strict=True))
    with torch.no_grad():
        predicted = state.module.eval()(inputs).argmax(dim=1)
    counted = targets != -100
    true, found = targets[counted], predicted[counted]
    expected = {
        "eval/iou": jaccard_score(true, found, average="macro"),
        "eval/pixel_accuracy": accuracy_score(true, found),
    }
    return evaluated(state)[0], expected


def pieces(num_samples: int) -> list[Any]:
    """Return a piece for each sample."""
    return [MicroPlan(torch.tensor([index])) for index in range(num_samples)]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    "keys", only("classes", {"metrics": (), "classes": ("dataset.num_classes=2",)})
)
def test_pixels_are_evaluated(keys: tuple[str, ...]) -> None:
    """A segmentation has the metrics of scikit-learn, pixels of -100 aside."""
    config = compose_config(*PICTURES, *keys, world_size=2)
    for found, expected in run_ranks(segmented, 2, config):
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        assert ("eval/accuracy" in found) == bool(keys)
        assert found.get("eval/accuracy", found["eval/pixel_accuracy"]) == pytest.approx(
            found["eval/pixel_accuracy"]
        )


def trained(env: DistEnv, config: Config) -> Trace:
    """Train two epochs."""
    return run_loop(env, config, max_steps=None)


def test_a_schedule_may_follow_an_own_metric() -> None:
    """The rate falls, since no value is better than the first by so much."""
    keys = ("metrics=mae", "scheduler=plateau", "scheduler.monitor=eval/mae", "train.epochs=3")
    config = compose_config(
        *TOY, *keys, "scheduler.patience=0", "+scheduler.threshold=0.9", "train.log_every_steps=1"
    )
    (trace,) = run_ranks(trained, 1, config)
    assert trace.error == ""
    rates = [line["train/lr"] for line in trace.lines if "train/lr" in line]
    assert rates[-1] < rates[0]
    assert "eval/mae" in trace.saved[max(trace.saved)]


LATE = "+metrics.late._target_=own_metrics.Demanding"
SCALARS = ("train.step=own_steps.squares", "allowed_targets=[own_steps,own_metrics]")


@pytest.mark.parametrize(
    ("group", "keys", "name", "there"),
    [
        ("scheduler", ("scheduler=plateau",), "eval/late_other", "eval/loss, eval/late_mean"),
        ("early_stop", ("early_stop.mode=min",), "eval/late_other", "eval/loss, eval/late_mean"),
        ("checkpoint", (), "eval/late_other", "eval/loss, eval/late_mean"),
        ("checkpoint", SCALARS, "train/late", "train/loss, train/worst, train/mean_error"),
    ],
)
def test_a_metric_that_no_step_or_evaluation_gives_is_named(
    group: str, keys: tuple[str, ...], name: str, there: str
) -> None:
    """Two samples could not tell; the first step or evaluation can."""
    monitor = f"{group}.monitor={name}"
    (trace,) = run_ranks(trained, 1, compose_config(*TOY, LATE, OWN, *keys, monitor))
    assert trace.error.startswith(f"UserError: {group}.monitor ({name}) must be one of {there}")


def tried(env: DistEnv, config: Config) -> tuple[set[str], set[str], dict[str, str]] | str:
    """Return what a few samples tell of the metrics, or the error; leave the state as it was."""
    state = build(env, config)
    random, was_training = torch.get_rng_state(), state.module.training
    try:
        known = try_evaluation(state)
        validate_monitors(config, known)
    except UserError as error:
        return str(error)
    assert torch.equal(random, torch.get_rng_state())
    assert state.module.training == was_training
    return set(known.names), set(known.unknown), dict(known.directions)


def test_a_few_samples_tell_which_metrics_there_are() -> None:
    """But for one that needs more samples."""
    demanding = "+metrics.late._target_=own_metrics.Demanding"
    by_class = "+metrics.each._target_=own_metrics.Vector"
    config = compose_config(*TOY, "metrics=mae", demanding, by_class, OWN)
    (found,) = run_ranks(tried, 1, config)
    assert not isinstance(found, str), found
    names, unknown, directions = found
    assert {"eval/loss", "eval/mae", "eval/each_0", "eval/each_1"} <= names
    assert unknown == {"late"}
    assert directions == {"eval/mae": "min"}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("train.step=own_metrics.without_outputs",),
         "metrics.mae needs the outputs of the model, and train.step returns none"),
        (("train.step=own_metrics.with_scalar",),
         "train.step=own_metrics.with_scalar returns the scalar mae, and eval/mae is another"),
        (("metrics=[mae,top_k]",), "metrics.top_k (TopKAccuracy): outputs (2, "),
        (("+metrics.mine._target_=own_metrics.Nothing",),
         "metrics.mine (Nothing) computes a NoneType"),
        (("+metrics.mine._target_=own_metrics.Unmerged",),
         "metrics.mine (Unmerged): it has no merge(self, other)"),
        (("+metrics.mine._target_=own_metrics.SumOfLargest",),
         "metrics.mine (SumOfLargest) depends on the number of ranks: eval/mine is "),
        (("+metrics.late._target_=own_metrics.Demanding", "checkpoint.monitor=eval/lat_mean"),
         "checkpoint.monitor (eval/lat_mean) must be one of"),
        (("checkpoint.monitor=eval/mae_0", "checkpoint.mode=min"),
         "checkpoint.monitor (eval/mae_0) must be one of eval/loss, train/loss"),
        (("scheduler=plateau", "scheduler.monitor=eval/f1", "scheduler.mode=max"),
         "scheduler.monitor (eval/f1) must be one of eval/loss"),
        (("+metrics.mine._target_=own_metrics.Pictures", "+metrics.mine.size=3"),
         "metrics.mine (own_metrics.Pictures) builds an object of type Pictures, not Metric"),
        (("+metrics.mine._target_=own_metrics.Summed", "+metrics.mine.k=3"),
         "metrics.mine.k is not a keyword of own_metrics.Summed; it has none"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_before_the_first_step(keys: tuple[str, ...], sentence: str) -> None:
    """Else the first evaluation would end the run, with nothing saved."""
    overrides = (*TOY, "metrics=mae", *keys, OWN)
    try:
        config = compose_config(*overrides)
        (found,) = run_ranks(raised, 1, config)
    except UserError as error:
        found = str(error)
    assert sentence in found


def raised(env: DistEnv, config: Config) -> Any:
    """Return the error of building or trying a run."""
    try:
        return tried(env, config)
    except UserError as error:
        return str(error)
