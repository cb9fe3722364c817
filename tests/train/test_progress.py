"""A run ends when its evaluations no longer improve: on all ranks, and at the same step resumed."""

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiers import first_of
from train_states import STEPS_PER_EPOCH, TOY, Trace, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.config.training import EarlyStopConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Job
from ddp_runner.tracking.run_record import versions
from ddp_runner.train.progress import Progress, count_evaluation, early_stop_of, stop_reason
from ddp_runner.worker import run_task

LOSS = "eval/loss"


def stops_after(values: list[float], settings: EarlyStopConfig, metric: str = LOSS) -> int | None:
    """Return after how many evaluations the run ends; None if it goes on."""
    progress = Progress()
    for number, value in enumerate(values, start=1):
        # Between two evaluations the run may be interrupted: the state is the progress's.
        progress = Progress(**asdict(progress))
        count_evaluation(progress, settings, {metric: value})
        if stop_reason(progress, settings) is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "keys", "expected"),
    [
        ([5, 4, 3, 2, 1], {}, None),
        ([5, 4, 4, 4, 1], {}, 4),
        ([5, 4, 6, 3, 7, 8], {}, 6),
        ([5, 4.95, 4.9, 4.85], {"min_delta": 0.1}, 3),
        ([5, 4.8, 4.6, 4.4], {"min_delta": 0.1}, None),
        ([5, math.nan, math.inf], {}, 3),
        ([math.nan, 5, 4], {}, None),
        ([math.nan, math.nan], {}, 2),
        ([-math.inf, -math.inf], {}, 2),
        ([5, 5], {"patience": 1}, 2),
        ([1, 2, 3, 4], {"mode": "max"}, None),
        ([1, 2, 3, 4], {"monitor": None}, None),
    ],
)
def test_it_counts_evaluations_in_a_row(
    values: list[float], keys: dict[str, object], expected: int | None
) -> None:
    """The first is the best so far; a value that is no number is no improvement."""
    settings = replace(EarlyStopConfig(monitor=LOSS, patience=2, mode="min"), **keys)
    assert stops_after(values, settings) == expected


class Score:
    """A metric of the user's that says which end is best."""

    higher_is_better = True


def test_the_direction_is_known_of_the_metric() -> None:
    """More accuracy is better; a metric of the user's may say so itself."""
    for metric, mode in (("eval/loss", "min"), ("eval/accuracy", "max"), ("eval/mine_top5", "max")):
        settings = EarlyStopConfig(monitor=metric, patience=2)
        mine: Any = {"mine": Score()}
        assert early_stop_of(settings, mine) == replace(settings, mode=mode)


def test_another_metric_begins_anew() -> None:
    """A resumed run may watch another one, with values of another size."""
    progress = Progress()
    for _ in range(3):
        count_evaluation(progress, EarlyStopConfig(LOSS, patience=2, mode="min"), {LOSS: 0.1})
    other = EarlyStopConfig("eval/f1", patience=2, mode="max")
    assert stop_reason(progress, other) is None
    count_evaluation(progress, other, {"eval/f1": 0.01})
    assert (progress.best, progress.bad_evaluations) == (0.01, 0)


# Nothing is an improvement: the first evaluation is the best, and the third one ends the run.
STUCK = ("early_stop.monitor=eval/loss", "early_stop.patience=2", "early_stop.min_delta=1e6")
END = 3 * STEPS_PER_EPOCH


def loop(env: DistEnv, config: Config, folder: Path, stop_after: int | None = None) -> Trace:
    """Run from the newest checkpoint to the end or a stop."""
    return run_loop(env, config, max_steps=None, folder=folder, stop_after=stop_after)


def test_all_ranks_stop_at_one_step_and_a_resume_does_nothing_more(tmp_path: Path) -> None:
    """The last step is saved though no checkpoint was due."""
    config = compose_config(*TOY, *STUCK, "checkpoint.every_epochs=null", world_size=2)
    for trace in run_ranks(loop, 2, config, tmp_path):
        assert (trace.status, trace.progress.step) == ("completed", END)
        assert trace.saved_steps == [END]
    for trace in run_ranks(loop, 2, config, tmp_path):
        assert (trace.status, trace.progress.step) == ("completed", END)
        assert (trace.lines, trace.saved_steps) == ([], [])
    patient = compose_config(*TOY, *STUCK, "early_stop.patience=4", world_size=2)
    for trace in run_ranks(loop, 2, patient, tmp_path):
        assert trace.progress.step == 5 * STEPS_PER_EPOCH


@pytest.mark.parametrize("mode", first_of(["async", "sync"]))
def test_trainers_end_with_their_server(tmp_path: Path, mode: str) -> None:
    """It alone evaluates; what they still compute is dropped."""
    keys = ("parallelism=ps", f"parallelism.mode={mode}")
    config = compose_config(*TOY, *STUCK, *keys, world_size=3)
    server, *trainers = run_ranks(loop, 3, config, tmp_path)
    assert (server.status, server.progress.step) == ("completed", END)
    assert [trace.status for trace in trainers] == ["completed"] * 2
    again, *_ = run_ranks(loop, 3, config, tmp_path)
    assert (again.status, again.lines) == ("completed", [])


@pytest.mark.parametrize("stop_after", first_of([STEPS_PER_EPOCH + 1, 2 * STEPS_PER_EPOCH - 1]))
def test_a_resumed_run_stops_at_the_same_step(tmp_path: Path, stop_after: int) -> None:
    """Stopped amid the second epoch, or at its end, before the evaluation."""
    config = compose_config(*TOY, *STUCK, world_size=2)
    for trace in run_ranks(loop, 2, config, tmp_path, stop_after):
        assert trace.status == "preempted"
    for trace in run_ranks(loop, 2, config, tmp_path):
        assert (trace.status, trace.progress.step) == ("completed", END)


def whole_run(env: DistEnv, config: Config, run_dir: Path) -> str:
    """Run as a worker does, and return how it ended."""
    job = Job(
        config=config, started_at=time.time(), provenance={"versions": versions()}, run_dir=run_dir
    )
    status: str = run_task(job, replace(env, launcher="environment")).status
    return status


def test_run_json_and_the_log_have_the_reason(tmp_path: Path) -> None:
    """The run is completed, and its best model is exported."""
    store = f"launch.init_method='{(tmp_path / 'store').as_uri()}'"
    best = ("checkpoint.monitor=eval/loss", "checkpoint.mode=min")
    config = compose_config(*TOY, *STUCK, *best, store)
    assert run_ranks(whole_run, 1, config, tmp_path / "run", backend=None) == ["completed"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["step"]) == ("completed", END)
    reason = record["stopped_early"]
    assert reason.startswith(f"stopped early at step {END}: eval/loss did not improve on ")
    assert reason.endswith(" by more than 1e+06 in the last 2 evaluations")
    assert reason in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert (tmp_path / "run" / "model.safetensors").exists()
