"""Evaluations inside an epoch: when they run, and that they change no step."""

from pathlib import Path

import pytest
from ranks import run_ranks
from tiers import first_of, only
from train_states import STEPS_PER_EPOCH, TOY, Trace, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError

KEYS = (*TOY, "train.epochs=2", "train.log_every_steps=1", "checkpoint.every_steps=1")
# Nothing is an improvement: the first evaluation is the best, and the third one ends the run.
STUCK = ("early_stop.monitor=eval/loss", "early_stop.patience=2", "early_stop.min_delta=1e6")
STREAM = (
    "model=toy",
    "model._target_=torch.nn.Linear",
    "+model.in_features=4",
    "+model.out_features=1",
    "dataset=torch_dataset",
    "dataset.train={_target_:own_streams.Stateful,size:null}",
    "dataset.eval={_target_:own_streams.Plain,size:7}",
    "train.step=own_streams.numbered",
    "allowed_targets=[own_streams]",
    "optimizer.lr=0.01",
    "batch.per_rank=2",
    "train.max_steps=8",
    "train.log_every_steps=1",
    "checkpoint.every_steps=1",
)


def loop(
    env: DistEnv, config: Config, folder: Path | None = None, stop_after: int | None = None
) -> Trace:
    """Run from the newest checkpoint to the end or a stop."""
    return run_loop(env, config, max_steps=None, folder=folder, stop_after=stop_after)


def evaluated(trace: Trace) -> list[float]:
    """Return the steps after which the run was evaluated."""
    return [line["step"] for line in trace.lines if "eval/loss" in line]


def trained(trace: Trace) -> list[tuple[float, float]]:
    """Return the steps and their losses."""
    return [(line["step"], line["train/loss"]) for line in trace.lines if "train/loss" in line]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("train.eval_every_steps=3", [3, 4, 6, 8]),  # an epoch has four steps
        ("train.eval_every_steps=2", [2, 4, 6, 8]),
        ("train.eval_every_steps=3 train.eval_every_epochs=0", [3, 6, 8]),
        ("train.eval_every_steps=4 train.eval_every_epochs=0", [4, 8]),
        ("train.eval_every_steps=3 train.max_steps=7", [3, 4, 6, 7]),
        ("train.eval_every_epochs=0", []),
    ],
)
def test_by_steps_by_epochs_and_at_the_end(keys: str, expected: list[int]) -> None:
    """Once at a step for which both are due; the steps are those of a run without."""
    (plain,) = run_ranks(loop, 1, compose_config(*KEYS, "train.eval_every_epochs=0"))
    (trace,) = run_ranks(loop, 1, compose_config(*KEYS, *keys.split()))
    assert STEPS_PER_EPOCH == 4
    assert evaluated(trace) == expected
    assert trained(trace) == trained(plain)[: len(trained(trace))]
    assert {step for step, saved in trace.saved.items() if "eval/loss" in saved} == set(expected)


@pytest.mark.parametrize("stop_after", first_of([5, 2, 3, 4, 6]))
@pytest.mark.parametrize("keys", only("stream", {"epochs": KEYS, "stream": STREAM}))
def test_a_resumed_run_evaluates_the_same(
    tmp_path: Path, keys: tuple[str, ...], stop_after: int
) -> None:
    """Wherever it was stopped: right before, right after, or at an evaluation."""
    config = compose_config(*keys, "train.eval_every_steps=3", world_size=2)
    whole, _ = run_ranks(loop, 2, config)
    first, _ = run_ranks(loop, 2, config, tmp_path, stop_after)
    assert first.status == "preempted"
    second, _ = run_ranks(loop, 2, config, tmp_path)
    assert evaluated(whole)[0] == 3
    lines = [
        [{key: one for key, one in line.items() if "perf/" not in key} for line in lines]
        for lines in (first.lines + second.lines, whole.lines)
    ]
    assert lines[0] == lines[1]
    assert second.weights.equal(whole.weights)


def test_early_stopping_inside_an_epoch(tmp_path: Path) -> None:
    """It evaluates and saves once, on all ranks; resumed, the run has nothing left to do."""
    config = compose_config(*KEYS, *STUCK, "train.eval_every_steps=1", world_size=2)
    for trace in run_ranks(loop, 2, config, tmp_path):
        assert (trace.status, trace.progress.step) == ("completed", 3)
        assert evaluated(trace) == [1, 2, 3]
        assert trace.saved_steps == [1, 2, 3]
    for trace in run_ranks(loop, 2, config, tmp_path):
        assert (trace.status, trace.progress.step, trace.lines) == ("completed", 3, [])


def test_it_serves_what_monitors_an_evaluation() -> None:
    """Without evaluations by epochs; a wrong value is rejected."""
    keys = ("early_stop.monitor=eval/loss", "train.eval_every_epochs=0")
    compose_config(*TOY, *keys, "train.eval_every_steps=2")
    with pytest.raises(UserError, match=r"train.eval_every_steps \(0\) must be"):
        compose_config(*TOY, "train.eval_every_steps=0")
