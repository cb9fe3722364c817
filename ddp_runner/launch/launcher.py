"""Runs one job: from its resolved config to the ranks on this machine, and to an exit code.

Ranks are forked from a server that has already imported torch, so they are up in a tenth of a
second. This process never imports torch on one machine; see ``machines`` for several.
"""

import signal
import sys
import tempfile
import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from ddp_runner.config.identity import work_hash
from ddp_runner.config.schema import has_own_loop
from ddp_runner.dist_env import prints_errors
from ddp_runner.errors import UserError
from ddp_runner.host.processes import adopt_orphans, start_fork_server
from ddp_runner.host.streams import print_line
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    Failure,
    Job,
    Outcome,
    Status,
)
from ddp_runner.launch.ranks import Ranks
from ddp_runner.launch.stop_requests import StopRequests, mark_ended
from ddp_runner.launch.wire import rank_environ
from ddp_runner.tracking.claim import begin_run
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import (
    RunError,
    fail_session,
    last_session_start,
    read_run_record,
)
from ddp_runner.tracking.start_block import starting_lines
from ddp_runner.tracking.trackers.start import followed


def launch(job: Job) -> Outcome:
    """Run a job to its end, and print why it failed if it did.

    On one machine the caller holds the lock of the run folder. On several machines rank 0 claims
    the folder and writes run.json, since the folder may be on another of them.
    """
    if job.config.launch.nnodes > 1:
        print_line(starting_lines(job), stream=sys.stdout)  # before torch, which takes seconds
        from ddp_runner.launch.machines import run_on_machines

        with ExitStack() as trackers:
            outcome = run_on_machines(job, trackers)
            return failed(job, outcome.failure, outcome.run_dir) if outcome.failure else outcome
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    if is_over(job):
        return Outcome(Status.COMPLETED, EXIT_COMPLETED, job.run_dir)
    begin_run(job)
    stop = StopRequests(running=lambda: [run_dir.path], is_quiet=job.slot is not None)
    try:
        with stop.handled(), followed(job, run_dir):
            return run_ranks(job, stop)
    except SystemExit:  # a signal came before there were ranks
        with suppress(UserError):  # the disk is full, or the folder is gone
            mark_ended(run_dir)
        raise


def is_over(job: Job) -> bool:
    """Return, and print, that a job resumes a user's loop that has completed and saved nothing.

    Raises:
        UserError: it has other keys now.
    """
    assert job.run_dir is not None
    run_dir, is_own = RunDir(job.run_dir), has_own_loop(job.config.task)
    record = read_run_record(run_dir, missing_ok=True) if is_own and job.config.resume else {}
    if record.get("status") != Status.COMPLETED or any(run_dir.checkpoints.glob("step-*")):
        return False
    what = f"{run_dir} has completed, and saved no checkpoint to go on from"
    if record.get("work_hash") != work_hash(job.config):
        raise UserError(f"{what} with other keys; start a new run")
    if prints_errors():
        print_line(f"{what}: nothing is left to do", stream=sys.stdout)
    return True


def run_ranks(job: Job, stop: StopRequests) -> Outcome:
    """Run all ranks on this machine, again if they fail, and return how they ended."""
    assert job.run_dir is not None
    start_fork_server()
    adopt_orphans()  # of ranks, if the server is killed that adopts them otherwise
    if job.shows_header:
        print_line(starting_lines(job), stream=sys.stdout)
    with tempfile.TemporaryDirectory(
        prefix="job-", dir=temp_folder(), ignore_cleanup_errors=True
    ) as temp:
        job = replace(job, temp=Path(temp))
        for attempt in count():
            ranks, size, run_id = Ranks(job, stop), job.config.world_size, uuid.uuid4().hex
            failure = ranks.run(
                [
                    rank_environ(
                        rank, job.config, attempt=attempt, run_id=run_id, local_world_size=size
                    )
                    for rank in range(size)
                ]
            )
            if failure is None:
                break
            if failure.kind == "user" or attempt >= job.config.launch.max_restarts:
                return failed(job, failure, job.run_dir)
            job = replace(job, earlier=(*job.earlier, (ranks.first_step, failure.sentence)))
    status = ranks.results[0]["status"]
    received = stop.received or signal.SIGTERM
    exit_code = EXIT_COMPLETED if status == Status.COMPLETED else 128 + received
    return Outcome(status, exit_code, job.run_dir)


def print_error(sentence: str) -> None:
    """Print one line to stderr. One rank of a machine prints: all ranks fail the same way."""
    if prints_errors():
        print_line(f"error: {sentence}", stream=sys.stderr)


def failed(job: Job, failure: Failure, folder: Path | None) -> Outcome:
    """Record and print why the ranks failed, and how to resume the run.

    A machine that is lost after rank 0 has completed the run is no failure.
    """
    if folder is not None and failure.kind == "machine":
        with suppress(UserError):  # run.json is damaged; the failure matters more
            record = read_run_record(RunDir(folder), missing_ok=True)
            if record.get("status") == Status.COMPLETED:
                return Outcome(Status.COMPLETED, EXIT_COMPLETED, folder)
    next_step = "" if failure.kind == "user" else "; go on with resume=RUN"
    if folder is not None and RunDir(folder).record.exists():  # it may be on another machine
        run_dir = RunDir(folder)
        rank = failure.rank if failure.rank >= 0 else None
        try:
            record = read_run_record(run_dir)
            known, started_at = record.get("error") or {}, job.started_at
            if job.config.launch.nnodes > 1:  # the session is that of rank 0's machine
                started_at = last_session_start(record)
            # Its own machine knows; a mistake on several machines is rank 0's to record.
            is_known = rank is None and known.get("kind") == failure.kind
            is_rank_zeros = job.config.launch.nnodes > 1 and failure.kind == "user"
            if not is_known and not is_rank_zeros:
                error = RunError(rank=rank, kind=failure.kind, sentence=failure.sentence)
                fail_session(run_dir, started_at=started_at, error=error)
            if failure.traceback:
                run_dir.logs.mkdir(exist_ok=True)
                run_dir.failure.write_text(failure.traceback, "utf-8", "backslashreplace")
            if next_step:
                details = run_dir.failure if failure.traceback else run_dir.logs
                next_step = f"; see {details}, then go on with resume=RUN"
        except (OSError, UserError) as error:
            # The cause stays first: a full disk is often the reason for both.
            next_step = f"; besides, {error}"
    failure = replace(failure, sentence=failure.sentence + next_step)
    print_error(failure.sentence)
    if failure.kind == "user":
        return Outcome(Status.FAILED, EXIT_USER_ERROR, folder, failure)
    print(failure.traceback, file=sys.stderr, flush=True)
    return Outcome(Status.FAILED, EXIT_FAILED, folder, failure)
