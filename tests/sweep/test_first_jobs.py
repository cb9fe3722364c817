"""The first jobs of a large grid start before the rest of it is planned."""

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest
from commands import CommandResult, run_command, wait_for
from omegaconf import DictConfig
from sweeps import needs_two_cores, only_sweep, statuses, table_row

from ddp_runner.cli import start_runs
from ddp_runner.cli.sweeping import Jobs
from ddp_runner.job import COMPLETED, Job, Outcome, Status
from ddp_runner.sweep import run_sweep
from ddp_runner.sweep.jobs import JobBatch, run_jobs
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.sweep_dir import read_plan
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.run_record import write_run_record

LIMIT_S = 60.0  # far above the usual
GRID = ("-m", "model=toy", "optimizer.lr=0.1,-1,0.2,0.3")
JOBS = [f"optimizer.lr={rate}" for rate in (0.1, -1, 0.2, 0.3)]
TITLES = [f"job {number + 1} of 4: {JOBS[number]}" for number in (0, 2, 3)]  # of valid jobs


@dataclass
class Course:
    """What a sweep of stand-ins does."""

    is_stopped: bool = False  # as its first jobs run
    batches: list[list[str]] = field(default_factory=list)  # titles of the jobs that run
    composed: list[int] = field(default_factory=list)  # numbers of the jobs
    has_started: Event = field(default_factory=Event)  # a batch runs
    has_ended: Event = field(default_factory=Event)  # its table is made

    def run(self, batch: JobBatch) -> dict[str, Outcome]:
        """Complete the jobs of a batch, or stop as Ctrl-C does."""
        self.batches.append([job.job.title for job in batch.jobs.values()])
        self.has_started.set()
        if self.is_stopped:
            return {"signal": Outcome.stopped(signal.SIGINT)}
        if run_sweep.PLANNING_S == 0 and len(self.batches) == 1:  # the first jobs still wait
            wait_for(lambda: len(read_plan(sweep_of(batch)).jobs) >= len(JOBS), timeout_s=LIMIT_S)
        return run_jobs(batch, execute=complete)

    def table(self, folder: Path, *, width: int) -> str:
        """Return the table of the sweep, which ends."""
        self.has_ended.set()
        return sweep_table(folder, width=width)


def sweep_of(batch: JobBatch) -> Path:
    """Return the folder of a batch's sweep."""
    return next(iter(batch.jobs.values())).sweep


def complete(job: Job) -> Outcome:
    """Stand for a run."""
    assert job.run_dir is not None
    write_run_record(job.run_dir, status=Status.COMPLETED)
    return COMPLETED


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Course:
    """Let the first job of each sweep start at once, and the others be composed after its start."""
    current = Course()

    class LateJobs(Jobs):
        def compose(self, words: Sequence[str], number: int) -> DictConfig:
            if number > 0 and run_sweep.PLANNING_S == 0:
                assert current.has_started.wait(LIMIT_S), "the first job waits for the others"
            if number > 1 and current.is_stopped:
                assert current.has_ended.wait(LIMIT_S), "a stopped sweep plans on"
            current.composed.append(number)
            return super().compose(words, number)

    monkeypatch.setattr(run_sweep, "PLANNING_S", 0.0)
    monkeypatch.setattr(run_sweep, "sweep_table", current.table)
    monkeypatch.setattr(start_runs, "Jobs", LateJobs)
    monkeypatch.setattr(Local, "run", lambda _, batch: current.run(batch))
    return current


def test_the_first_jobs_run_while_a_thread_plans_the_rest(
    tmp_path: Path, course: Course, answer_to: Callable[..., CommandResult]
) -> None:
    """An invalid job of the rest stops no other; titles and table are those of the whole grid."""
    end = answer_to(*GRID)
    assert course.batches == [TITLES[:1], TITLES[1:]]
    sweep = only_sweep(tmp_path)
    ends = ["completed", "failed", "completed", "completed"]
    assert statuses(sweep) == dict(zip(JOBS, ends, strict=True))
    assert [table_row(end.stdout, job)[1] for job in JOBS] == ends
    assert (end.exit_code, end.stderr.count("error: ")) == (2, 1)
    assert f"error: {JOBS[1]}: " in end.stderr
    assert "no longer made" not in end.stdout
    assert not read_plan(sweep).is_open


def test_an_invalid_job_of_the_rest_stops_a_sweep_once_it_is_found(
    tmp_path: Path, course: Course, answer_to: Callable[..., CommandResult]
) -> None:
    """With fail_fast the first jobs have run by then; the others wait."""
    assert answer_to(*GRID, "sweep.fail_fast=true").exit_code == 2
    assert course.batches == [TITLES[:1]]
    ends = ["completed", "failed", "queued", "queued"]
    assert statuses(only_sweep(tmp_path)) == dict(zip(JOBS, ends, strict=True))


def test_a_sweep_that_is_stopped_while_it_plans_continues(
    tmp_path: Path, course: Course, answer_to: Callable[..., CommandResult]
) -> None:
    """It plans no further job, and the same command validates all jobs before any starts."""
    course.is_stopped = True
    end = answer_to(*GRID)
    assert (end.exit_code, end.stderr) == (130, "")
    assert "the same command continues this sweep" in end.stdout
    assert course.composed in ([0, 1, 2], [0, 1], [0])  # whatever the thread had begun
    sweep = only_sweep(tmp_path)
    assert statuses(sweep) == {JOBS[0]: "queued"}
    assert read_plan(sweep).is_open

    course.is_stopped = False
    assert answer_to(*GRID).exit_code == 2
    assert course.batches[1:] == [TITLES]
    assert only_sweep(tmp_path) == sweep
    assert set(statuses(sweep)) == {*JOBS}
    assert not read_plan(sweep).is_open


@pytest.mark.parametrize(
    ("word", "planning_s"), [("seed=0", math.inf), ("sweep.calibrate=true", 0.0)]
)
def test_other_sweeps_are_planned_before_any_job_starts(
    word: str,
    planning_s: float,
    course: Course,
    monkeypatch: pytest.MonkeyPatch,
    answer_to: Callable[..., CommandResult],
) -> None:
    """A grid that is planned in time, and one whose calibrations depend on all jobs."""
    monkeypatch.setattr(run_sweep, "PLANNING_S", planning_s)
    course.has_started.set()
    assert answer_to(*GRID, word).exit_code == 2
    assert [batch[-3:] for batch in course.batches] == [TITLES]


def start_at_once() -> None:
    """Plan only the first job before it starts."""
    vars(run_sweep)["PLANNING_S"] = 0.0


@pytest.mark.full
@needs_two_cores
@pytest.mark.parametrize("slots", [1, 2])
def test_real_jobs_start_before_the_rest_is_planned(tmp_path: Path, slots: int) -> None:
    """One after the other, and in slots, which get the rest as another batch."""
    end = run_command(
        *(*GRID, "world_size=1", "train.max_steps=3", f"sweep.parallel_jobs={slots}"),
        folder=tmp_path,
        spares=slots,
        prepare=start_at_once,
    )
    assert end.exit_code == 2
    ends = ["completed", "failed", "completed", "completed"]
    assert statuses(only_sweep(tmp_path)) == dict(zip(JOBS, ends, strict=True))
    assert "job 4 of 4" in end.stdout
