"""Run one job: from its resolved config to the ranks on this machine, and to an exit code.

Ranks are forked from a server that has already imported torch, so they start in a tenth of a
second. This process never imports torch.
"""

import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_runner.config.identity import work_hash
from ddp_runner.config.schema import has_own_loop
from ddp_runner.dist_env import prints_errors
from ddp_runner.errors import UserError
from ddp_runner.host.processes import adopt_orphans
from ddp_runner.host.streams import print_line
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import COMPLETED, EXIT_FAILED, EXIT_USER_ERROR, Failure, Job, Outcome, Status
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
    is_alone = job.config.launch.nnodes == 1
    if is_alone:
        if is_over(job):
            return COMPLETED
        prepare_run_folder(job)
    # On several machines a folder is only known once a rank has claimed it. After a restart, the
    # ranks may claim another folder.
    folders, trackers = [] if job.run_dir is None else [job.run_dir], ExitStack()
    has_trackers = False

    def note_folder(path: Path, *, on_first_machine: bool) -> None:
        nonlocal has_trackers
        if path not in folders:
            folders.append(path)
        if on_first_machine and not has_trackers:
            has_trackers = True
            trackers.enter_context(followed(job, RunDir(path)))

    stop = StopRequests(running=lambda: folders, is_quiet=job.slot is not None)
    stop.may_save = not is_alone  # the first signal is a request, also while the machines meet
    try:
        with stop.handled(), trackers:
            if is_alone:
                note_folder(folders[0], on_first_machine=True)
            return run_ranks(job, stop, folders, note_folder)
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
    fact = f"{run_dir} has completed without a checkpoint"
    if record.get("work_hash") != work_hash(job.config):
        raise UserError(f"{fact}, so it cannot continue with other keys", "start a new run")
    if prints_errors():
        print_line(f"{fact}: nothing is left to do")
    return True


def run_ranks(
    job: Job, stop: StopRequests, folders: Sequence[Path], note_folder: Callable[..., object]
) -> Outcome:
    """Run this machine's ranks, restart them if any rank fails, and return how they ended.

    `folders` are the run's on this machine; ``note_folder`` adds those that ranks claim.
    """
    adopt_orphans()  # if the server is killed, which otherwise adopts a dead rank's children
    if job.shows_header:
        print_line(starting_lines(job))
    machines = Machines(job) if job.config.launch.nnodes > 1 else OneMachine(job)
    new_folder = tempfile.TemporaryDirectory(
        prefix="job-", dir=temp_folder(), ignore_cleanup_errors=True
    )
    with new_folder as temp, closing(machines):
        job = replace(job, temp=Path(temp))
        while True:
            try:
                group = machines.join(lambda: stop.received is not None)
            except UserError as error:  # after a failure, a machine did not come back
                if not job.earlier:
                    raise
                sentence = f"{job.earlier[-1][1]}; {error}"
                return report_failure(job, Failure(None, "machine", sentence), folders)
            if group is None:  # stopped while it waited for machines
                stop.announce(is_training=False)
                for path in folders[-1:]:  # an earlier attempt may have begun the run
                    mark_ended(path)
                return Outcome.stopped(stop.received or signal.SIGTERM)
            on_claim = partial(note_folder, on_first_machine=group.index == 0)
            ranks = Ranks(job, stop, on_claim)
            failure = ranks.run(group.environs(job), machines)
            if failure is None:
                outcome = ranks.results[min(ranks.results)]
                is_whole = outcome.status == Status.COMPLETED and not job.title
                # A signal in the last step of a sweep's job still ends the sweep.
                if stop.received is None or is_whole:
                    return outcome
                return Outcome.stopped(stop.received)
            failure = machines.agree_on_failure(failure)
            is_last = len(job.earlier) >= job.config.launch.max_restarts
            if failure.kind == "user" or failure.rank is None or is_last:
                return report_failure(job, failure, folders)
            job = replace(job, earlier=(*job.earlier, (ranks.first_step, failure.sentence)))


def print_error(sentence: str) -> None:
    """Print one line to stderr. One rank of a machine prints: all ranks fail the same way."""
    if prints_errors():
        print_line(f"error: {sentence}", stream=sys.stderr)


def report_failure(job: Job, failure: Failure, folders: Sequence[Path]) -> Outcome:
    """Record and print why the ranks failed, and how to resume the run.

    If a machine is lost after rank 0 has completed the run, the run has not failed.
    """
    advice = "continue with resume=RUN"
    run_dir = RunDir(folders[-1]) if folders else None
    if run_dir is not None and run_dir.record.exists():  # it may be on another machine
        details = run_dir.failure if failure.traceback else run_dir.logs
        advice = f"see {details}, then continue with {run_dir.resume_words(job.resume_arguments)}"
        try:
            record = read_run_record(run_dir)
            if failure.kind == "machine" and record.get("status") == Status.COMPLETED:
                return COMPLETED
            _record_failure(job, failure, run_dir, record)
        except (OSError, UserError) as error:
            # The cause comes first: a full disk is often the reason for both.
            sentence = f"{failure.sentence}; recording this failed too: {error}"
            failure = replace(failure, sentence=sentence)
            advice = ""
    if advice and failure.kind != "user":
        failure = replace(failure, sentence=f"{failure.sentence}; {advice}")
    print_error(failure.sentence)
    if failure.kind == "user":
        return Outcome(Status.FAILED, EXIT_USER_ERROR, failure.sentence)
    if failure.traceback:
        print(failure.traceback, file=sys.stderr, flush=True)
    return Outcome(Status.FAILED, EXIT_FAILED, failure.sentence)


def _record_failure(job: Job, failure: Failure, run_dir: RunDir, record: Mapping[str, Any]) -> None:
    """Write the failure into run.json, unless its own machine does, and its traceback to logs/.

    Raises:
        OSError: logs/ cannot be written.
        UserError: run.json cannot be written.
    """
    is_alone = job.config.launch.nnodes == 1
    is_recorded = failure.rank is None and (record.get("error") or {}).get("kind") == failure.kind
    if not is_recorded and (is_alone or failure.kind != "user"):  # else rank 0 records a mistake
        # On several machines the session is rank 0's.
        started_at = job.started_at if is_alone else last_session_start(record)
        error = RunError(rank=failure.rank, kind=failure.kind, sentence=failure.sentence)
        if not fail_session(run_dir, started_at=started_at, error=error):
            return
    if failure.traceback:
        run_dir.logs.mkdir(exist_ok=True)
        run_dir.failure.write_text(failure.traceback, "utf-8", "backslashreplace")
