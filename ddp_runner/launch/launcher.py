"""Run one job: from its resolved config to the ranks on this machine, and to an exit code.

Ranks are forked from a server that has already imported torch, so they start in a tenth of a
second. This process never imports torch.
"""

import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from ddp_runner.tracking.run_folder_claim import prepare_run_folder
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
        UserError: the machines of the run do not meet, or their settings contradict each other.
    """
    folders = [] if job.run_dir is None else [job.run_dir]
    is_alone = job.config.launch.nnodes == 1
    if is_alone:
        if is_over(job):
            return Outcome(Status.COMPLETED, EXIT_COMPLETED, job.run_dir)
        prepare_run_folder(job)
    stop = StopRequests(running=lambda: folders, is_quiet=job.slot is not None)
    stop.may_save = not is_alone  # the first signal is a request, also while the machines meet
    try:
        with stop.handled(), ExitStack() as trackers:
            if is_alone:
                trackers.enter_context(followed(job, RunDir(folders[0])))
            return run_ranks(job, stop, trackers, folders)
    except SystemExit:  # a signal came before there were ranks
        mark_ended(folders[0])
        raise


def is_over(job: Job) -> bool:
    """Return whether a user's loop has completed without a checkpoint to continue; print it if so.

    Raises:
        UserError: the loop has completed, and this command changes its keys.
    """
    assert job.run_dir is not None
    run_dir, is_own = RunDir(job.run_dir), has_own_loop(job.config.task)
    record = read_run_record(run_dir, missing_ok=True) if is_own and job.config.resume else {}
    if record.get("status") != Status.COMPLETED or any(run_dir.checkpoints.glob("step-*")):
        return False
    end = f"{run_dir} has completed without a checkpoint"
    if record.get("work_hash") != work_hash(job.config):
        raise UserError(f"{end}, so it cannot continue with other keys", "start a new run")
    if prints_errors():
        print_line(f"{end}: nothing is left to do", stream=sys.stdout)
    return True


def run_ranks(job: Job, stop: StopRequests, trackers: ExitStack, folders: list[Path]) -> Outcome:
    """Run this machine's ranks, restart them if any of the run fail, and return how they ended.

    When a rank claims the run folder, add it to `folders`, and its trackers to the stack.
    """
    start_fork_server()
    adopt_orphans()  # if the server is killed, which otherwise adopts a dead rank's children
    if job.shows_header:
        print_line(starting_lines(job), stream=sys.stdout)
    has_trackers = job.config.launch.nnodes == 1  # `launch` has started them
    machines = Machines(job) if job.config.launch.nnodes > 1 else OneMachine(job)

    def claimed(folder: Path) -> None:
        nonlocal has_trackers
        if folder not in folders:
            folders.append(folder)
        if not has_trackers and group is not None and group.index == 0:
            has_trackers = True
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
            except UserError as error:  # after a failure, a machine did not come back
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
            failure = machines.agree_on_failure(failure)
            is_last = len(job.earlier) >= job.config.launch.max_restarts
            if failure.kind == "user" or failure.rank < 0 or is_last:
                return failed(job, failure, folders)
            job = replace(job, earlier=(*job.earlier, (ranks.first_step, failure.sentence)))
    received, run_dir = stop.received or signal.SIGTERM, folders[-1] if folders else None
    if group is None:  # stopped while it waited for other machines
        stop.announce(is_training=False)
        if run_dir is not None:  # from an earlier attempt
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

    If a machine is lost after rank 0 has completed the run, the run has not failed.
    """
    folder = folders[-1] if folders else None
    advice = "continue with resume=RUN"
    if folder is not None and RunDir(folder).record.exists():  # it may be on another machine
        run_dir = RunDir(folder)
        details = run_dir.failure if failure.traceback else run_dir.logs
        arguments = " ".join([run_dir.resume_argument, *map(shlex.quote, job.resume_arguments)])
        advice = f"see {details}, then continue with {arguments}"
        try:
            record = read_run_record(run_dir)
            if failure.kind == "machine" and record.get("status") == Status.COMPLETED:
                return Outcome(Status.COMPLETED, EXIT_COMPLETED, folder)
            _record_failure(job, failure, run_dir, record)
        except (OSError, UserError) as error:
            # The cause comes first: a full disk is often the reason for both.
            failure = replace(failure, sentence=f"{failure.sentence}; besides, {error}")
            advice = ""
    if advice and failure.kind != "user":
        failure = replace(failure, sentence=f"{failure.sentence}; {advice}")
    print_error(failure.sentence)
    if failure.kind == "user":
        return Outcome(Status.FAILED, EXIT_USER_ERROR, folder, failure)
    if failure.traceback:
        print(failure.traceback, file=sys.stderr, flush=True)
    return Outcome(Status.FAILED, EXIT_FAILED, folder, failure)


def _record_failure(job: Job, failure: Failure, run_dir: RunDir, record: Mapping[str, Any]) -> None:
    """Write the failure into run.json, unless its own machine does, and its traceback to logs/.

    Raises:
        OSError: logs/ cannot be written.
        UserError: run.json cannot be written.
    """
    is_alone = job.config.launch.nnodes == 1
    is_recorded = failure.rank < 0 and (record.get("error") or {}).get("kind") == failure.kind
    if not is_recorded and (is_alone or failure.kind != "user"):  # else rank 0 records a mistake
        # On several machines the session is rank 0's.
        started_at = job.started_at if is_alone else last_session_start(record)
        rank = failure.rank if failure.rank >= 0 else None
        error = RunError(rank=rank, kind=failure.kind, sentence=failure.sentence)
        fail_session(run_dir, started_at=started_at, error=error)
    if failure.traceback:
        run_dir.logs.mkdir(exist_ok=True)
        run_dir.failure.write_text(failure.traceback, "utf-8", "backslashreplace")
