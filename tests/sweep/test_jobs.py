"""A launcher runs the jobs of a sweep that no other launcher holds or has ended."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sweeps import batch_of, planned, statuses, table_row

from ddp_runner.job import Job, Outcome
from ddp_runner.sweep import jobs as module
from ddp_runner.sweep.jobs import failed_outcome, run_jobs
from ddp_runner.sweep.sweep_dir import change_plan, read_plan
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.alive import Standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import fail_session, start_session, write_run_record

TIMES = {"started_at": 1.0, "startup_s": None, "wall_s": None}
ERROR = {"rank": 0, "kind": "crash", "sentence": "why"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the folder of a sweep with three jobs."""
    planned(tmp_path, *"abc")
    return tmp_path


def end(job: Job, status: str) -> Outcome:
    """Leave what a run of this status leaves."""
    assert job.run_dir is not None
    start_session(job.run_dir, started_at=job.started_at, status=status)
    return Outcome(status, 0)


def test_a_job_that_is_interrupted_is_the_last_one(sweep: Path) -> None:
    """The sweep was asked to stop; each job has begun when it was its turn."""
    began = []

    def execute(job: Job) -> Outcome:
        began.append(job.started_at)
        return end(job, "preempted" if len(began) == 2 else "completed")

    outcomes = run_jobs(batch_of(sweep, *"abc"), execute=execute)
    assert {name: one.status for name, one in outcomes.items()} == {
        **{"a": "completed", "b": "preempted"}
    }
    assert statuses(sweep) == {"a": "completed", "b": "preempted", "c": "queued"}
    assert 0.0 < began[0] <= began[1]


def test_a_job_that_another_launcher_took_meanwhile_is_left_to_it(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another launcher may complete it before this launcher has its lock."""

    @contextmanager
    def locked_late(run_dir: RunDir) -> Iterator[None]:
        write_run_record(run_dir, status="completed")
        yield

    monkeypatch.setattr(RunDir, "locked", locked_late)
    outcomes = run_jobs(batch_of(sweep, *"abc"), execute=pytest.fail)
    assert [one.status for one in outcomes.values()] == ["completed"] * 3
    assert set(statuses(sweep).values()) == {"completed"}


def test_a_job_that_another_launcher_runs_is_waited_for(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failure counts too, and may stop the sweep."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    batch = batch_of(sweep, *"abc", fail_fast=True)
    ran = list[str]()

    with RunDir(sweep / "a").locked():

        def execute(job: Job) -> Outcome:
            assert job.run_dir is not None
            ran.append(job.run_dir.name)
            write_run_record(sweep / "a", status="failed", error=ERROR)  # by the other launcher
            return end(job, "completed")

        outcomes = run_jobs(batch, execute=execute)
    assert ran == ["b"]
    assert {name: one.status for name, one in outcomes.items()} == {
        **{"b": "completed", "a": "failed"}
    }


def test_a_job_that_is_held_for_long_is_looked_at_again_and_again(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This goes on until the other launcher has ended it, and is announced once."""
    looks = list[float]()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if looks.count(module.POLL_S) == 3:
            write_run_record(sweep / "a", status="completed")

    monkeypatch.setattr(module.time, "sleep", look)
    with RunDir(sweep / "a").locked():
        outcomes = run_jobs(batch_of(sweep, "a"), execute=pytest.fail)
    assert {name: one.status for name, one in outcomes.items()} == {"a": "completed"}
    assert capsys.readouterr().out == "waiting for 1 job of other launchers\n"


def test_what_had_failed_before_stops_no_sweep(sweep: Path) -> None:
    """Under fail_fast, only a failure since the start stops it."""
    start_session(sweep / "a", started_at=1.0, status="running")
    fail_session(sweep / "a", started_at=1.0, error=ERROR)

    def execute(job: Job) -> Outcome:
        assert job.run_dir is not None
        return Outcome("failed", 2, "broken")

    outcomes = run_jobs(batch_of(sweep, *"abc", fail_fast=True), execute=execute)
    assert list(outcomes) == ["a", "b"]
    assert statuses(sweep) == {"a": "failed", "b": "failed", "c": "queued"}
    assert "b: broken" in sweep_table(sweep)


def test_a_failed_job_runs_again_once_if_it_is_asked(sweep: Path) -> None:
    """A failure of this very start is not older than the start."""
    start_session(sweep / "a", started_at=1.0, status="running")
    fail_session(sweep / "a", started_at=1.0, error=ERROR)
    ran = list[str]()

    def execute(job: Job) -> Outcome:
        assert job.run_dir is not None
        ran.append(job.run_dir.name)
        start_session(job.run_dir, started_at=job.started_at, status="running")
        fail_session(job.run_dir, started_at=job.started_at, error=ERROR)
        return Outcome("failed", 1)

    run_jobs(batch_of(sweep, "a"), execute=execute)
    assert ran == []
    batch = batch_of(sweep, "a", retry="failed")
    for _ in range(2):  # this launcher, and another one that began with it
        run_jobs(batch, execute=execute)
    assert ran == ["a"]


def test_a_mistake_has_its_exit_code(tmp_path: Path) -> None:
    """A damaged run has the same code."""
    kinds = {"user": 2, "crash": 1, "signal": 1, "late": 1}
    for kind, code in kinds.items():
        ended = Standing("failed", {"error": {**ERROR, "kind": kind}})
        assert failed_outcome(ended).exit_code == code
    assert failed_outcome(Standing("damaged", fault="run.json is cut")).exit_code == 2


def test_a_job_whose_launcher_is_gone_is_lost_in_the_table(sweep: Path) -> None:
    """It runs as long as somebody holds its folder; then any launcher takes it."""
    record = {"status": "running", "sessions": [TIMES], "host": "here"}
    (sweep / "a" / "run.json").write_text(json.dumps(record))
    with RunDir(sweep / "a").locked():
        assert table_row(sweep_table(sweep), "a")[1] == "starting"
        (sweep / "a" / ".lock.holder").rename(sweep / "holder")
    (sweep / "holder").rename(sweep / "a" / ".lock.holder")  # a kill leaves it
    assert table_row(sweep_table(sweep), "a")[1] == "lost"
    batch = batch_of(sweep, "a")
    outcomes = run_jobs(batch, execute=lambda job: end(replace(job), "completed"))
    assert outcomes["a"].status == "completed"


def test_a_resumed_run_that_is_rejected_is_tried_once_by_all_launchers(sweep: Path) -> None:
    """Its folder cannot tell, so the plan does, also to slots that began before."""
    start_session(sweep / "a", started_at=1.0, status="running")
    write_run_record(sweep / "a", status="completed", startup_s=1.0)
    resumed = replace(read_plan(sweep).jobs["a"], resumes=1.0)
    change_plan(sweep, lambda plan: replace(plan, jobs={**plan.jobs, "a": resumed}))
    batches = [batch_of(sweep, "a") for _ in range(2)]
    tried = list[Job]()

    def reject(job: Job) -> Outcome:
        tried.append(job)
        assert job.run_dir is not None
        return Outcome("failed", 2, "the batch must not change")

    for batch in batches:
        outcomes = run_jobs(batch, execute=reject)
        assert outcomes["a"].exit_code == 2
        assert batch.num_failures({**outcomes, "signal": outcomes["a"]}) == 1
    assert len(tried) == 1
    assert "a: the batch must not change" in sweep_table(sweep)
