"""Runs the jobs of a sweep; one that fails does not stop the others."""

import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from ddp_runner.config.sections import SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.job import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    Failure,
    Job,
    Outcome,
    Status,
)
from ddp_runner.sweep.ledger import INVALID, Entry, Ledger
from ddp_runner.tracking.claim import freeze
from ddp_runner.tracking.run_dir import InUseError, RunDir

POLL_S = 0.5  # while all jobs left are run by another launcher


@dataclass(frozen=True)
class Batch:
    """Jobs to run: in turn, in slots, or shared with another launcher."""

    jobs: Mapping[str, Job]  # by their id, each with its folder
    ledger: Ledger  # of the sweep, with an entry for each job
    settings: SweepConfig
    known_failures: Collection[str] = ()  # ids of jobs that had failed before the sweep's start

    def has_failed(self) -> bool:
        """Return whether the sweep must stop: too many jobs have failed since its start."""
        most = 1 if self.settings.fail_fast else self.settings.max_failures
        if most is None:
            return False
        return len(self.ledger.failed().difference(self.known_failures)) >= most


def freeze_unheld(job: Job) -> None:
    """Freeze a job's config, unless another launcher holds the job: it freezes the same config."""
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    with suppress(InUseError), run_dir.locked():
        freeze(job, run_dir)


def run_jobs(
    batch: Batch,
    *,
    execute: Callable[[Job], Outcome],
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Run every job that is left; return how each job ended that was reached, in their order.

    Wait for a job that another launcher runs. A preempted job resumes from its checkpoint, since it
    runs in the folder that it had.

    Args:
        batch: the jobs, queued in the ledger.
        execute: runs one job to its end.
        stop_requested: returns whether to start no further job.
    """
    outcomes, waiting = dict[str, Outcome](), dict(batch.jobs)
    while waiting:
        num_waiting = len(waiting)
        for job_id, job in list(waiting.items()):
            if stop_requested() or batch.has_failed():
                waiting.clear()
                break
            entry = batch.ledger.entry(job_id)
            outcome = recorded(entry, job) or _take(entry, job, batch.ledger, execute)
            if outcome is None:
                continue  # another launcher has it
            outcomes[job_id] = outcome
            del waiting[job_id]
            if outcome.status == Status.PREEMPTED:
                waiting.clear()
                break
        if len(waiting) == num_waiting:
            time.sleep(POLL_S)
    return [outcomes[job_id] for job_id in batch.jobs if job_id in outcomes]


def _take(
    entry: Entry, job: Job, ledger: Ledger, execute: Callable[[Job], Outcome]
) -> Outcome | None:
    """Run a job; return None if another launcher has it."""
    assert job.run_dir is not None
    is_held = False
    with ExitStack() as stack:
        try:
            stack.enter_context(RunDir(job.run_dir).locked())
            is_held = True
            if ledger.entry(entry.job_id) != entry:
                return None
            ledger.note(entry.job_id, status=Status.RUNNING)
            outcome = execute(replace(job, started_at=time.time()))
        except InUseError:
            return None
        except (UserError, OSError) as error:  # a damaged run.json, a full disk: others go on
            if not is_held and ledger.entry(entry.job_id) != entry:
                return None  # another launcher has it, or has ended it
            outcome = Outcome.invalid(job.run_dir, sentence(error))
            print(f"error: {sentence(error)}", file=sys.stderr, flush=True)
        failure = outcome.failure
        ledger.note(
            entry.job_id,
            status=outcome.status,
            kind=failure.kind if failure else None,
            sentence=failure.sentence if failure else None,
        )
        return outcome


def sentence(error: Exception) -> str:
    """Return the line to print for an error; for an OSError with the fix."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; free space or make the folder writable"
    return str(error)


def recorded(entry: Entry, job: Job) -> Outcome | None:
    """Return how a job ended, from the ledger; None if it has not ended."""
    if entry.status == Status.COMPLETED:
        return Outcome(Status.COMPLETED, EXIT_COMPLETED, job.run_dir)
    if entry.status != Status.FAILED:
        return None
    failure = Failure(rank=0, kind=entry.kind or "crash", sentence=entry.sentence or "")
    exit_code = EXIT_USER_ERROR if failure.kind in ("user", INVALID) else EXIT_FAILED
    return Outcome(Status.FAILED, exit_code, job.run_dir, failure)
