"""Runs the jobs of a sweep; one that fails does not stop the others."""

import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ddp_runner.config.schema import SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.job import EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.scratch import Failure
from ddp_runner.sweep.ledger import INVALID, Entry, Ledger
from ddp_runner.tracking.run_dir import InUseError, RunDir

POLL_S = 0.5  # while all jobs left are run by another launcher


def run_jobs(
    jobs: Mapping[str, Job],
    *,
    ledger: Ledger,
    settings: SweepConfig,
    execute: Callable[[Job], Outcome],
    known_failures: Collection[str] = (),
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Run every job that is left; return how each job ended that was reached, in their order.

    Wait for a job that another launcher runs. A preempted job resumes from its checkpoint, since it
    runs in the folder that it had.

    Args:
        jobs: by their id, each with its folder.
        ledger: of the sweep, with an entry for each job.
        settings: what to do about failures.
        execute: runs one job to its end.
        known_failures: ids of jobs that had failed before the sweep was started this time.
        stop_requested: returns whether to start no further job.
    """
    outcomes = dict[str, Outcome]()
    while waiting := [job_id for job_id in jobs if job_id not in outcomes]:
        for job_id in waiting:
            entries = ledger.read()
            if stop_requested() or failed_enough(entries, settings, known_failures):
                return [outcomes[one] for one in jobs if one in outcomes]
            if entries[job_id].status in (Status.COMPLETED, Status.FAILED):
                outcomes[job_id] = recorded(entries[job_id], jobs[job_id].run_dir)
                break
            outcome = _take(entries[job_id], jobs[job_id], ledger, execute)
            if outcome is None:
                continue
            outcomes[job_id] = outcome
            if outcome.status == Status.PREEMPTED:
                return [outcomes[one] for one in jobs if one in outcomes]
            break
        else:
            time.sleep(POLL_S)
    return [outcomes[one] for one in jobs]


def failed_enough(
    entries: Mapping[str, Entry], settings: SweepConfig, known_failures: Collection[str]
) -> bool:
    """Return whether the sweep must stop: too many jobs have failed since it was started."""
    most = 1 if settings.fail_fast else settings.max_failures
    failed = [
        one.job_id
        for one in entries.values()
        if one.status == Status.FAILED and one.job_id not in known_failures
    ]
    return most is not None and len(failed) >= most


def _take(
    entry: Entry, job: Job, ledger: Ledger, execute: Callable[[Job], Outcome]
) -> Outcome | None:
    """Run a job; return None if another launcher has it."""
    assert job.run_dir is not None
    with ExitStack() as stack:
        try:
            stack.enter_context(RunDir(job.run_dir).locked())
            if ledger.read()[entry.job_id] != entry:
                return None
            ledger.note(entry.job_id, status=Status.RUNNING)
            outcome = execute(replace(job, started_at=time.time()))
        except InUseError:
            return None
        except (
            UserError,
            OSError,
        ) as error:  # a damaged run.json, a full disk: others go on
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


def recorded(entry: Entry, run_dir: Path | None) -> Outcome:
    """Return how a job ended that was run by an earlier start or by another launcher."""
    if entry.status == Status.COMPLETED:
        return Outcome(Status.COMPLETED, 0, run_dir)
    failure = Failure(rank=0, kind=entry.kind or "crash", sentence=entry.sentence or "")
    exit_code = EXIT_USER_ERROR if failure.kind in ("user", INVALID) else EXIT_FAILED
    return Outcome(Status.FAILED, exit_code, run_dir, failure)
