"""Runs one job: from its resolved config to the ranks on this machine, and to an exit code.

Ranks are forked from a server that has already imported torch, so they are up in a tenth of a
second. This process never imports torch.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
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
from ddp_runner.launch.group import OneMachine
from ddp_runner.launch.machines import Machines
from ddp_runner.launch.ranks import Ranks
from ddp_runner.launch.stop_requests import StopRequests, mark_ended
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_folder_claim import begin_run
from ddp_runner.tracking.run_record import (
    RunError,
    fail_session,
    last_session_start,
    read_run_record,
)
from ddp_runner.tracking.start_block import starting_lines
from ddp_runner.tracking.trackers.start_trackers import followed


def launch(job: Job) -> Outcome:
    """Run a job to its end, and print why it failed if it did.

    On one machine the caller holds the lock of the run folder. On several machines rank 0 claims
    the folder and writes run.json, since the folder may be on another of them.

    Raises:
        UserError: the machines of the run do not meet, or do not fit together.
    """
    folders = [] if job.run_dir is None else [job.run_dir]
    is_alone = job.config.launch.nnodes == 1
    if is_alone:
        if is_over(job):
            return Outcome(Status.COMPLETED, EXIT_COMPLETED, job.run_dir)
        begin_run(job)
    stop = StopRequests(running=lambda: folders, is_quiet=job.slot is not None)
    stop.may_save = not is_alone  # the first signal is a request, also while the machines meet
    try:
        with stop.handled(), ExitStack() as trackers:
            if is_alone:
                trackers.enter_context(followed(job, RunDir(folders[0])))
            return run_ranks(job, stop, trackers, folders)
    except SystemExit:  # a signal came before there were ranks
        with suppress(UserError):  # the disk is full, or the folder is gone
            mark_ended(RunDir(folders[0]))
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


def run_ranks(job: Job, stop: StopRequests, trackers: ExitStack, folders: list[Path]) -> Outcome:
    """Run this machine's ranks, again if any of the run fail, and return how they ended.

    Where a rank claims the run folder, it is added to `folders`, and its trackers to the stack.
    """
    start_fork_server()
    adopt_orphans()  # of ranks, if the server is killed that adopts them otherwise
    if job.shows_header:
        print_line(starting_lines(job), stream=sys.stdout)
    machines = OneMachine(job) if job.config.launch.nnodes == 1 else Machines(job)
    with_trackers = set(folders)

    def claimed(folder: Path) -> None:
        if folder not in folders:
            folders.append(folder)
        if group is not None and group.place == 0 and folder not in with_trackers:
            with_trackers.add(folder)
            trackers.enter_context(followed(job, RunDir(folder)))

    with (
        tempfile.TemporaryDirectory(
            prefix="job-", dir=temp_folder(), ignore_cleanup_errors=True
        ) as temp,
        closing(machines),
    ):
        job = replace(job, temp=Path(temp))
        while True:
            try:
                group = machines.join(lambda: stop.is_asked)
            except UserError as error:
                if not job.earlier:
                    raise
                sentence = f"{job.earlier[-1][1]}; {error}"
                return failed(job, Failure(-1, "machine", sentence), folders)
            if group is None:
                break
            ranks = Ranks(job, stop, claimed)
            failure = ranks.run(group.environs(job), machines)
            if failure is None:
                break
            failure = machines.first_failure(failure)
            is_last = len(job.earlier) >= job.config.launch.max_restarts
            if failure.kind == "user" or failure.rank < 0 or is_last:
                return failed(job, failure, folders)
            job = replace(job, earlier=(*job.earlier, (ranks.first_step, failure.sentence)))
    received, run_dir = stop.received or signal.SIGTERM, folders[-1] if folders else None
    if group is None:  # it was stopped while it waited for other machines
        stop.say(is_training=False)
        if run_dir is not None:  # another machine may have it
            mark_ended(run_dir)
        return Outcome(Status.PREEMPTED, 128 + received, run_dir)
    result = ranks.results[min(ranks.results)]
    exit_code = EXIT_COMPLETED if result["status"] == Status.COMPLETED else 128 + received
    return Outcome(result["status"], exit_code, Path(result["run_dir"]))


def print_error(sentence: str) -> None:
    """Print one line to stderr. One rank of a machine prints: all ranks fail the same way."""
    if prints_errors():
        print_line(f"error: {sentence}", stream=sys.stderr)


def failed(job: Job, failure: Failure, folders: Sequence[Path]) -> Outcome:
    """Record and print why the ranks failed, and how to resume the run.

    A machine that is lost after rank 0 has completed the run is no failure.
    """
    folder = folders[-1] if folders else None
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
