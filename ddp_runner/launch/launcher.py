"""Runs one job: from its resolved config to a worker group on this machine, and to an exit code.

Ranks are forked from a server that has already imported torch, so a worker group is up in a tenth
of a second; torch's elastic agent watches and restarts them. The server starts before this process
imports torch, so that the two imports overlap.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.config.schema import work_hash
from ddp_runner.dist_env import prints_errors
from ddp_runner.errors import UserError
from ddp_runner.host.processes import start_fork_server
from ddp_runner.host.streams import print_line
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.launch.signals import StopSignals, mark_ended
from ddp_runner.scratch import Failure, Scratch
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import (
    RunFields,
    begin_session,
    is_rejected_resume,
    read_run_record,
    replace_run_record,
    write_run_record,
)
from ddp_runner.tracking.start_block import starting_lines

if TYPE_CHECKING:
    from ddp_runner.launch.meeting import Meeting


def launch(job: Job, *, meeting: "Meeting | None" = None) -> Outcome:
    """Run a job to its end, and print why it failed if it did.

    On one machine, and in a sweep, the caller holds the lock of the run folder. On several machines
    rank 0 writes run.json, and claims the folder of a single run, since it may be elsewhere.

    `meeting` is where the machines of a sweep have met; None: they meet for this job.
    """
    if job.config.launch.most_nodes > 1:
        return run_worker_group(job, meeting=meeting)
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    if not run_dir.is_frozen:
        freeze(job, run_dir)
    before = read_run_record(run_dir, missing_ok=True)
    fields = RunFields(status=Status.RUNNING, error=None, work_hash=work_hash(job.config))
    if (slot := job.slot) is not None:  # the fields stay when the run goes on alone later
        fields |= {"parallel_jobs": True, "cores": slot.cores, "cuda_visible_devices": slot.gpus}
    begin_session(run_dir, started_at=job.started_at, **fields)
    try:
        outcome = run_worker_group(job)
    except SystemExit:  # a signal came before StopSignals handled them
        mark_ended(run_dir)
        raise
    if outcome.exit_code == EXIT_USER_ERROR and is_rejected_resume(run_dir, before):
        replace_run_record(run_dir, before)
    return outcome


def run_worker_group(job: Job, *, meeting: "Meeting | None" = None) -> Outcome:
    """Start a worker group on this machine, wait for its end, and return how it ended."""
    start_fork_server()
    if job.shows_header:
        print_line(starting_lines(job), stream=sys.stdout)  # before torch, which takes seconds
    # With one store for rendezvous and process group, a restarted worker group now and then finds
    # the keys of the killed one, and fails.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(
        prefix="job-", dir=temp_folder(), ignore_cleanup_errors=True
    ) as folder:
        scratch = Scratch(Path(folder))
        if job.slot is not None:
            scratch.stop.symlink_to(job.slot.scratch.stop)  # one request stops all slots
        stop_signals = StopSignals(
            scratch,
            timeout_s=job.config.launch.shutdown_timeout_s,
            # On several machines rank 0 claims the folder.
            running=lambda: list(filter(None, [job.run_dir or scratch.run_folder()])),
        )
        # The parent of a slot handles its signals.
        with stop_signals if job.slot is None else nullcontext():
            # Inside the block: a signal during these seconds of imports is handled like any other.
            from ddp_runner.launch.supervisor import supervise

            _quiet_agent()
            result = supervise(replace(job, scratch=scratch), meeting=meeting)
            run_dir = job.run_dir or scratch.run_folder()
            if isinstance(result, Failure):
                return _failed(result, run_dir)
    received = stop_signals.received or signal.SIGTERM
    if result is None:
        if run_dir is not None and RunDir(run_dir).record.exists():
            mark_ended(run_dir)
        return Outcome(Status.PREEMPTED, 128 + received, run_dir)
    exit_code = EXIT_COMPLETED if result["status"] == Status.COMPLETED else 128 + received
    return Outcome(result["status"], exit_code, Path(result["run_dir"]))


def print_error(sentence: str) -> None:
    """Print one line to stderr. One rank of a machine prints: all ranks fail the same way."""
    if prints_errors():
        print_line(f"error: {sentence}", stream=sys.stderr)


def _failed(failure: Failure, folder: Path | None) -> Outcome:
    """Record and print why the ranks failed, and how to go on.

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
            known = read_run_record(run_dir).get("error") or {}
            if not (rank is None and known.get("kind") == failure.kind):  # its own machine knows
                write_run_record(
                    run_dir,
                    status=Status.FAILED,
                    finished_at=time.time(),
                    error={"rank": rank, "kind": failure.kind, "sentence": failure.sentence},
                )
            if failure.traceback:
                run_dir.logs.mkdir(exist_ok=True)
                run_dir.failure.write_text(failure.traceback, encoding="utf-8")
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


def _quiet_agent() -> None:
    """Silence the agent's own failure report, which ours replaces, unless LOGLEVEL is set."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
