"""What a command submits of a sweep on Slurm that was begun before.

tests/cluster has whole sweeps on a real Slurm.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import SETTINGS, Queue, three_jobs
from sweeps import batch_of, statuses

from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.sweep.jobs import JobBatch
from ddp_runner.sweep.slurm import executor as slurm
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.slurm.queue import RECORD
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record


@pytest.fixture
def batch(tmp_path: Path) -> JobBatch:
    """Return three queued jobs."""
    return three_jobs(tmp_path / "sweep")


def test_a_start_submits_only_what_is_neither_there_nor_done(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job is in the queue, one was completed meanwhile, one was cancelled."""
    sweep, submitted = batch.jobs["a"].sweep, list[str]()
    for index, name in enumerate("abc"):
        (sweep / name / RECORD).write_text(f"x_{index}")
    write_run_record(sweep / "b", status="completed")
    write_run_record(sweep / "c", status="preempted")

    def fake_submit(jobs: list[Job], **_: object) -> list[str]:
        submitted.extend(job.title for job in jobs)
        return ["y_0"]

    monkeypatch.setattr(slurm, "submit", fake_submit)
    queue = Queue(monkeypatch, {"x_0": "RUNNING", "y_0": "RUNNING"})

    def ask(num_asked: int) -> None:
        if num_asked == 3:
            write_run_record(sweep / "a", status="completed")
            write_run_record(sweep / "c", status="completed")
            queue.states = {}

    queue.on_ask = ask
    executor = Slurm(sweep, SETTINGS)
    outcomes = executor.run(batch)
    executor.close()
    assert submitted == ["job c"]
    assert [one.exit_code for one in outcomes.values()] == [0, 0, 0]
    assert set(statuses(sweep).values()) == {"completed"}


def test_a_failed_job_is_submitted_again_only_if_asked(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed while nobody watched."""
    sweep, submitted = batch.jobs["a"].sweep, list[str]()
    one = replace(batch, jobs={"a": batch.jobs["a"]})
    (sweep / "a" / RECORD).write_text("x_0")
    error = {"rank": 0, "kind": "crash", "sentence": "why"}
    write_run_record(sweep / "a", status="failed", error=error)

    def fake_submit(jobs: list[Job], **_: object) -> list[str]:
        submitted.extend(job.title for job in jobs)
        write_run_record(sweep / "a", status="completed")
        return ["y_0"]

    monkeypatch.setattr(slurm, "submit", fake_submit)
    Queue(monkeypatch, {})
    executor = Slurm(sweep, SETTINGS)
    assert [end.exit_code for end in executor.run(one).values()] == [1]
    assert (submitted, one.jobs["a"].standing.sentence) == ([], "why")
    again = batch_of(sweep, "a", retry="failed")
    assert [end.exit_code for end in executor.run(again).values()] == [0]
    assert submitted == ["job a"]
    executor.close()


def test_two_commands_never_submit_the_same_sweep(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a command submit a job that runs elsewhere."""
    Queue(monkeypatch, {})
    first, second = (Slurm(batch.jobs["a"].sweep, SETTINGS) for _ in range(2))
    first._lock()
    with pytest.raises(UserError, match=r"another command submits the jobs of .*sweep; wait"):
        second.run(batch)
    first.close()
    with (
        RunDir(batch.jobs["b"].run_dir.path).locked(),
        pytest.raises(UserError, match="b is in use by a process outside of this sweep's queue"),
    ):
        second.run(batch)
    second.close()
