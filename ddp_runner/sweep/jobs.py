"""Runs what is left of a sweep's jobs; one that fails does not stop the others. Torch-free.

The lock of a job's folder is all that launchers share: it decides who runs the job. So launchers,
slots and machines may work on one sweep, and each sees in the folders what the others have done.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from ddp_runner.config.sections import SweepConfig
from ddp_runner.errors import UserError, counted, os_sentence
from ddp_runner.job import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    Failure,
    Job,
    Outcome,
    Status,
)
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.plan_file import (
    PLAN,
    TO_RUN,
    Plan,
    PlannedJob,
    change_plan,
    faulty,
    read_plan,
)
from ddp_runner.tracking.alive import Standing
from ddp_runner.tracking.run_dir import InUseError, RunDir
from ddp_runner.tracking.run_folder_claim import freeze
from ddp_runner.tracking.run_record import last_session_start, read_run_record

POLL_S = 0.5  # while all jobs left are run by another launcher


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep that can be run: what is planned, and what every rank receives."""

    planned: PlannedJob
    job: Job
    sweep: Path  # the folder of the sweep
    sessions: int = 0  # of its run, if that had failed before the sweep began

    @property
    def standing(self) -> Standing:
        """How it stands now; another launcher may have noted in the plan why it cannot begin."""
        plan = self.sweep / PLAN
        stamp = plan.stat().st_mtime_ns if plan.exists() else 0
        planned = _plan_at(self.sweep, stamp).jobs.get(self.planned.job_id, self.planned)
        return planned.standing(self.sweep)

    @property
    def run_dir(self) -> RunDir:
        """Its folder."""
        return RunDir(self.sweep / self.planned.folder)

    def is_as(self, found: Standing) -> bool:
        """Return whether nobody has run it since a look; this process holds its folder."""
        record = read_run_record(self.run_dir, missing_ok=True)
        if self.planned.resumes is not None and not found.record:
            return bool(last_session_start(record) == self.planned.resumes)
        return record == found.record

    def has_failed_before(self, found: Standing) -> bool:
        """Return whether a failure is older than this start of the sweep."""
        is_new = found.fault is not None  # such as a mistake in the command
        return self.sessions > 0 and not is_new and num_sessions(found) == self.sessions


@dataclass(frozen=True)
class JobBatch:
    """Jobs to run by their id, and the rules of the sweep."""

    jobs: Mapping[str, SweepJob]
    settings: SweepConfig
    num_failed: int = 0  # since the sweep's start, in the batches before

    def is_over(self, num_failed: int) -> bool:
        """Return whether the sweep must stop: too many of these jobs have failed, too."""
        most = 1 if self.settings.fail_fast else self.settings.max_failures
        return most is not None and self.num_failed + num_failed >= most

    def is_to_run(self, one: SweepJob, found: Standing) -> bool:
        """Return whether a job that nobody runs is left to run."""
        is_again = self.settings.retry == "failed" and one.has_failed_before(found)
        return found.status in TO_RUN or (found.status == Status.FAILED and is_again)

    def failures(self, outcomes: Mapping[str, Outcome]) -> int:
        """Return how many jobs have failed since the sweep's start, of those with an outcome."""
        failed = [
            self.jobs[one]
            for one, end in outcomes.items()
            if one in self.jobs and end.status == Status.FAILED
        ]
        return sum(not one.has_failed_before(one.standing) for one in failed)


@lru_cache(maxsize=1)
def _plan_at(sweep: Path, stamp: int) -> Plan:
    """Return the plan of a sweep, which was changed at this time; many jobs ask for one plan."""
    return read_plan(sweep)


def num_sessions(found: Standing) -> int:
    """Return how many sessions a run has had, at least 1 of one that has ended."""
    sessions = found.record.get("sessions")
    return max(1, len(sessions)) if isinstance(sessions, list) else 1


def freeze_unheld(job: Job) -> None:
    """Freeze a job's config, unless another launcher holds the job: it freezes the same config.

    It is not flushed to the disk, which for thousands of jobs takes minutes. A training writes it
    once more before its first step, and the same command does so for the jobs that wait.
    """
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    with suppress(InUseError), run_dir.locked():
        freeze(job, run_dir, sync=False)


def run_left(batch: JobBatch, *, execute: Callable[[Job], Outcome]) -> dict[str, Outcome]:
    """Run every job that is left; return how each job ended that was reached.

    Wait for a job that another launcher runs. A preempted job is the last one. The next start of
    the sweep resumes it from its checkpoint, since it runs in the folder that it had.

    Args:
        batch: the jobs, frozen in their folders.
        execute: runs one job to its end.
    """
    outcomes, left = dict[str, Outcome](), dict(batch.jobs)
    num_failed, is_told = 0, False
    while left and not batch.is_over(num_failed):
        # Jobs that others run stay first, so a failure there stops the sweep before the next job.
        for job_id in left:
            one = batch.jobs[job_id]
            outcome = ended(batch, one) or _take(batch, one, execute)
            if outcome is not None:
                break
        else:
            if batch.settings.parallel_jobs == 1 and not is_told:  # slots wait for each other
                is_told = True
                print(f"waiting for {counted(len(left), 'job')} of other launchers", flush=True)
            time.sleep(POLL_S)
            continue
        num_failed += batch.failures({job_id: outcome})
        outcomes[job_id] = outcome
        del left[job_id]
        if outcome.status == Status.PREEMPTED:
            break
    return outcomes


def ended(batch: JobBatch, one: SweepJob) -> Outcome | None:
    """Return how a job has ended, by its folder; None if it is left to run, or runs."""
    found = one.standing
    if found.status == Status.COMPLETED:
        return Outcome(Status.COMPLETED, EXIT_COMPLETED, one.run_dir.path)
    if not found.has_failed or batch.is_to_run(one, found):
        return None
    return failure(found, one.run_dir.path)


def ended_jobs(batch: JobBatch) -> dict[str, Outcome]:
    """Return how each job has ended that has, by its id."""
    found = {job_id: ended(batch, one) for job_id, one in batch.jobs.items()}
    return {job_id: outcome for job_id, outcome in found.items() if outcome is not None}


def failure(found: Standing, run_dir: Path) -> Outcome:
    """Return the outcome of a job that has failed."""
    cause = Failure(rank=0, kind=found.kind or "crash", sentence=found.sentence or "")
    exit_code = EXIT_USER_ERROR if cause.kind == "user" else EXIT_FAILED
    return Outcome(Status.FAILED, exit_code, run_dir, cause)


def _take(batch: JobBatch, one: SweepJob, execute: Callable[[Job], Outcome]) -> Outcome | None:
    """Run a job; return None if another launcher has it, or had it since the last look."""
    found, run_dir = one.standing, one.run_dir
    if not batch.is_to_run(one, found):
        return None
    is_held = False
    with ExitStack() as stack:
        try:
            stack.enter_context(run_dir.locked())
            is_held = True
            if not one.is_as(found):
                return None
            outcome = execute(replace(one.job, started_at=time.time()))
        except InUseError:
            return None
        except (UserError, OSError) as error:  # a damaged run.json, a full disk: others run
            if not is_held and one.standing.record != found.record:
                return None  # another launcher has it, or has ended it
            sentence = os_sentence(error) if isinstance(error, OSError) else str(error)
            print_error(sentence)
            outcome = Outcome.invalid(run_dir.path, sentence)
        if outcome.failure is not None and not one.standing.has_failed:
            fault = partial(faulty, one.planned.job_id, outcome.failure.sentence)
            with suppress(UserError):  # a full disk; why the job failed is printed
                change_plan(one.sweep, fault)
        return outcome
