"""Runs the jobs of a sweep; a job that fails does not stop the others. Torch-free.

The lock of a job's folder decides which launcher runs the job. So several launchers, slots and
machines can work on one sweep. Each sees in the folders what the others have done.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from ddp_runner.config.sections import SweepConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, counted, os_sentence
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import COMPLETED, EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.sweep_dir import PLAN, TO_RUN, PlannedJob, change_plan, read_plan, with_fault
from ddp_runner.tracking.alive import Standing
from ddp_runner.tracking.run_dir import InUseError, RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record

POLL_S = 0.5  # between two checks, while other launchers run all remaining jobs
# What a config depends on: a node, and the facts of rank 0 if another launcher starts the ranks.
JobHardware = tuple[Hardware, DistEnv | None]


@dataclass(frozen=True)
class SweepJob:
    """A valid job of a sweep."""

    planned: PlannedJob
    job: Job  # what every rank receives
    sweep: Path  # folder of the sweep
    sessions: int = 0  # number of sessions of a run that had failed before the sweep began

    @property
    def standing(self) -> Standing:
        """How the job stands now; another launcher may have written a fault to the plan."""
        plan = self.sweep / PLAN
        stamp = plan.stat().st_mtime_ns if plan.exists() else 0
        planned = _cached_jobs(self.sweep, stamp).get(self.planned.job_id, self.planned)
        return planned.standing(self.sweep)

    @property
    def run_dir(self) -> RunDir:
        """The folder of the job."""
        return RunDir(self.sweep / self.planned.folder)

    def is_unchanged(self, standing: Standing) -> bool:
        """Return whether nobody has run the job since `standing` was read; we hold its lock."""
        record = read_run_record(self.run_dir, missing_ok=True)
        if self.planned.resumes is not None and not standing.record:
            return bool(last_session_start(record) == self.planned.resumes)
        return record == standing.record

    def has_failed_before(self, standing: Standing) -> bool:
        """Return whether a failed job had failed before this start of the sweep."""
        return standing.fault is None and 0 < self.sessions == num_sessions(standing)


@dataclass(frozen=True)
class JobBatch:
    """The jobs to run, by id, and the settings of the sweep."""

    jobs: Mapping[str, SweepJob]
    settings: SweepConfig
    num_failed: int = 0  # failed jobs of the earlier batches since the sweep's start

    def must_stop(self, num_failed: int) -> bool:
        """Return whether the sweep must stop after this number of failures in the batch."""
        limit = 1 if self.settings.fail_fast else self.settings.max_failures
        return limit is not None and self.num_failed + num_failed >= limit

    def must_run(self, job: SweepJob, standing: Standing) -> bool:
        """Return whether a start of the sweep runs the job."""
        is_retried = self.settings.retry == "failed" and job.has_failed_before(standing)
        return standing.status in TO_RUN or (standing.status == Status.FAILED and is_retried)

    def outcome(self, job: SweepJob) -> Outcome | None:
        """Return how a job has ended, by its folder; None if it has not, or must run again."""
        standing = job.standing
        if standing.status == Status.COMPLETED:
            return COMPLETED
        if not standing.has_failed or self.must_run(job, standing):
            return None
        return failed_outcome(standing)

    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcome of each job that has ended, by its id."""
        outcomes = {job_id: self.outcome(job) for job_id, job in self.jobs.items()}
        return {job_id: outcome for job_id, outcome in outcomes.items() if outcome is not None}

    def num_failures(self, outcomes: Mapping[str, Outcome]) -> int:
        """Return how many of these jobs have failed since the sweep's start."""
        ended = [(self.jobs[job_id], outcomes[job_id]) for job_id in self.jobs.keys() & outcomes]
        failed = [job for job, outcome in ended if outcome.status == Status.FAILED]
        return sum(not job.has_failed_before(job.standing) for job in failed)


@lru_cache(maxsize=1)
def _cached_jobs(sweep: Path, stamp: int) -> Mapping[str, PlannedJob]:
    """Return the jobs of the plan written at `stamp`; thousands of jobs ask for the same plan."""
    return read_plan(sweep).jobs


def num_sessions(standing: Standing) -> int:
    """Return the number of sessions of a run that has ended, at least 1."""
    sessions = standing.record.get("sessions")
    return max(1, len(sessions)) if isinstance(sessions, list) else 1


def freeze_unheld(job: Job) -> None:
    """Freeze a job's config, unless another launcher holds the job: it freezes the same config.

    Do not flush it, which takes minutes for thousands of jobs: a training writes it again.
    """
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    with suppress(InUseError), run_dir.locked():
        run_dir.freeze(job, sync=False)


def run_jobs(batch: JobBatch, *, execute: Callable[[Job], Outcome]) -> dict[str, Outcome]:
    """Run the jobs that have not ended; return the outcome of each job by its id.

    Wait for jobs that another launcher runs. Stop after a preempted job, or too many failures: the
    next start of the sweep runs the rest. `execute` runs one job to its end.
    """
    outcomes, remaining = dict[str, Outcome](), list(batch.jobs)
    num_failed, is_announced = 0, False
    while remaining and not batch.must_stop(num_failed):
        # Jobs of other launchers stay first: their failure must stop the sweep before the next job.
        for job_id in remaining:
            job = batch.jobs[job_id]
            outcome = batch.outcome(job) or _run_job(batch, job, execute)
            if outcome is not None:
                break
        else:
            if batch.settings.parallel_jobs == 1 and not is_announced:  # slots wait silently
                is_announced = True
                print(
                    f"waiting for {counted(len(remaining), 'job')} of other launchers", flush=True
                )
            time.sleep(POLL_S)
            continue
        num_failed += batch.num_failures({job_id: outcome})
        outcomes[job_id] = outcome
        remaining.remove(job_id)
        if outcome.status == Status.PREEMPTED:
            break
    return outcomes


def failed_outcome(standing: Standing) -> Outcome:
    """Return the outcome of a job that has failed."""
    exit_code = EXIT_USER_ERROR if standing.kind == "user" else EXIT_FAILED
    return Outcome(Status.FAILED, exit_code, standing.sentence)


def _run_job(batch: JobBatch, job: SweepJob, execute: Callable[[Job], Outcome]) -> Outcome | None:
    """Run a job; return None if it must not run, or another launcher runs it or has run it."""
    standing, run_dir = job.standing, job.run_dir
    if not batch.must_run(job, standing):
        return None
    with ExitStack() as stack:
        try:
            stack.enter_context(run_dir.locked())
            if not job.is_unchanged(standing):
                return None
            outcome = execute(replace(job.job, started_at=time.time()))
        except (UserError, OSError) as error:  # a damaged run.json, a full disk
            if isinstance(error, InUseError):
                return None
            sentence = os_sentence(error) if isinstance(error, OSError) else str(error)
            print_error(sentence)
            outcome = Outcome(Status.FAILED, EXIT_USER_ERROR, sentence)
        if outcome.fault is not None and not job.standing.has_failed:
            change_plan(job.sweep, partial(with_fault, job.planned.job_id, outcome.fault))
        return outcome
