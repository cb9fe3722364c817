"""The command watches a sweep's jobs in Slurm's queue until they end, or it is stopped."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Queue, three_jobs
from sweeps import statuses, table_row

from ddp_runner.config.sections import SweepConfig
from ddp_runner.sweep.jobs import JobBatch
from ddp_runner.sweep.slurm import watch as slurm_watch
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.run_record import write_run_record


@pytest.fixture
def batch(tmp_path: Path) -> JobBatch:
    """Return three queued jobs."""
    return three_jobs(tmp_path / "sweep")


def watch(
    batch: JobBatch, signals: slurm_watch.Signals | None = None, **names: str
) -> slurm_watch.Watch:
    """Return what watches the jobs, given the name of each in the queue."""
    folder, kept = batch.jobs["a"].sweep, signals or slurm_watch.Signals()
    return slurm_watch.Watch(batch, names, folder=folder, signals=kept)


def record_failure(run_dir: Path) -> None:
    """Note in a run's folder that a rank has failed."""
    error = {"rank": 0, "kind": "crash", "sentence": "why"}
    write_run_record(run_dir, status="failed", error=error)


def test_a_command_follows_the_queue_to_the_end_of_each_job(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job may be cancelled, or Slurm may have forgotten it."""
    sweep = batch.jobs["a"].sweep
    queue = Queue(monkeypatch, {"x_0": "PENDING", "x_1": "PENDING", "x_2": "PENDING"})

    def ask(num_asked: int) -> None:
        match num_asked:
            case 2:
                queue.states |= {"x_0": "RUNNING", "x_1": "RUNNING"}
            case 3:
                write_run_record(sweep / "a", status="completed")
                queue.is_down = True
            case 5:
                queue.is_down, queue.states = False, {"x_1": "RUNNING", "x_2": "CANCELLED"}
            case 6:
                queue.states = {}

    queue.on_ask = ask
    outcomes = watch(batch, a="x_0", b="x_1", c="x_2").run()
    assert statuses(sweep) == {"a": "completed", "b": "preempted", "c": "preempted"}
    assert [(one.status, one.exit_code) for one in outcomes.values()] == [
        ("completed", 0),
        ("preempted", 143),
        ("preempted", 143),
    ]
    out, err = capsys.readouterr()
    assert out.startswith("waiting for 3 jobs; see them with  python -m ddp_runner.status ")
    assert "job a  completed" in out
    assert err.count("squeue failed: no controller; its jobs continue") == 1

    table = sweep_table(sweep)
    assert "b: Slurm has forgotten job x_1 and its run has not completed" in table
    assert "c: Slurm's job x_2 was cancelled; the same command continues it" in table
    write_run_record(sweep / "b", status="completed")
    assert table_row(sweep_table(sweep), "b")[1] == "completed"


def test_too_many_failures_cancel_the_rest(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancelled jobs can continue later, and do not decide the exit code."""
    sweep = batch.jobs["a"].sweep
    queue = Queue(monkeypatch, {"x_0": "FAILED", "x_1": "RUNNING", "x_2": "PENDING"})
    record_failure(sweep / "a")
    strict = replace(batch, settings=SweepConfig(fail_fast=True))
    outcomes = watch(strict, a="x_0", b="x_1", c="x_2").run()
    assert queue.cancelled == ["x_1", "x_2"]
    assert [one.exit_code for one in outcomes.values()] == [1]
    assert statuses(sweep) == {"a": "failed", "b": "preempted", "c": "preempted"}


def test_the_first_ctrl_c_leaves_the_jobs_and_the_second_cancels_them(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM leaves them at once."""
    queue = Queue(monkeypatch, {"x_0": "RUNNING", "x_1": "PENDING", "x_2": "PENDING"})
    names = {"a": "x_0", "b": "x_1", "c": "x_2"}
    for signum, words in (
        (
            signal.SIGINT,
            "SIGINT: leaving 3 jobs to Slurm; Ctrl-C again within 0 s cancels them (scancel)",
        ),
        (signal.SIGTERM, "SIGTERM: leaving 3 jobs to Slurm; the same command finds them again"),
    ):
        monkeypatch.setattr(slurm_watch, "SECOND_CHANCE_S", 0.05)
        leaving = watch(batch, **names)
        leaving._signals.put(signum)
        (outcome,) = leaving.run().values()
        assert (outcome.status, outcome.exit_code) == ("preempted", 128 + signum)
        assert words in capsys.readouterr().out
    assert queue.cancelled == []

    monkeypatch.setattr(slurm_watch, "SECOND_CHANCE_S", 600.0)
    monkeypatch.setattr(slurm_watch, "ONE_REQUEST_S", 0.0)
    cancelling = watch(batch, **names)
    for _ in range(2):
        cancelling._signals.put(signal.SIGINT)
    outcomes = cancelling.run()
    assert queue.cancelled == ["x_0", "x_1", "x_2"]
    assert [one.exit_code for one in outcomes.values()] == [130]


def test_a_failure_after_ctrl_c_is_left_to_the_next_command(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs were left to Slurm; a failure noted here would not count for that command."""
    sweep, strict = batch.jobs["a"].sweep, replace(batch, settings=SweepConfig(fail_fast=True))
    names = {"a": "x_0", "b": "x_1", "c": "x_2"}
    queue = Queue(monkeypatch, dict.fromkeys(names.values(), "RUNNING"))
    monkeypatch.setattr(slurm_watch, "SECOND_CHANCE_S", 0.2)

    class CtrlC(slurm_watch.Signals):
        """Send Ctrl-C between two polls, just before a job fails."""

        def get(self, *args: Any, **kwargs: Any) -> int:
            if queue.states["x_0"] == "FAILED":
                return super().get(*args, **kwargs)
            queue.states["x_0"] = "FAILED"
            record_failure(sweep / "a")
            return signal.SIGINT

    leaving = watch(strict, CtrlC(), **names)
    assert [one.exit_code for one in leaving.run().values()] == [130]
    assert queue.cancelled == []
    watch(strict, **names).run()
    assert queue.cancelled == ["x_1", "x_2"]
    assert statuses(sweep)["a"] == "failed"


def test_ctrl_c_leaves_jobs_that_are_being_cancelled(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends at once, without the offer to cancel them."""
    Queue(monkeypatch, {"x_0": "FAILED", "x_1": "RUNNING", "x_2": "RUNNING"})
    monkeypatch.setattr(slurm_watch, "cancel", lambda names: None)  # they are still saving
    record_failure(batch.jobs["a"].run_dir.path)
    leaving = watch(replace(batch, settings=SweepConfig(fail_fast=True)), a="x_0", b="x_1", c="x_2")
    leaving._signals.put(signal.SIGINT)
    assert [one.exit_code for one in leaving.run().values()] == [1, 130]
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "SIGINT: leaving 2 jobs to Slurm; the same command finds them again"
