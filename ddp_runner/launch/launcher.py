"""From a resolved config to a worker group on this machine, and to an exit code.

Called by ``__main__`` for each job. Workers are forked from a server that has imported torch
already, so that a group is up in a tenth of a second; torch's elastic agent watches and restarts
them. The server starts before this process imports torch, so that the two imports overlap.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ddp_runner.errors import UserError
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
from ddp_runner.launch.fork_server import start_fork_server
from ddp_runner.launch.signals import Interrupts
from ddp_runner.scratch import STOP
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.start_block import starting_lines

FAILURE_FILE = "failure.txt"  # in logs/ of a run: the traceback of what made it fail


def launch(job: Job) -> Outcome:
    """Start a worker group on this machine, wait for its end, and return how it ended."""
    start_fork_server()
    if job.shows_header:
        print_line(starting_lines(job), stream=sys.stdout)  # before torch, which takes seconds
    # One shared store for rendezvous and process group would keep the keys of a group that was
    # killed, and the restarted one fails over them now and then.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    slot = job.slot
    scratch = Path(tempfile.mkdtemp(prefix="job-", dir=temp_folder()))
    if slot is not None:
        (scratch / STOP).symlink_to(slot.folder / STOP)  # one request stops the jobs of all slots
    try:
        with Interrupts(
            scratch,
            timeout_s=job.config.launch.shutdown_timeout_s,
            running=lambda: [job.run_dir] if job.run_dir else [],
            answers=slot is None,  # a slot is told by the process that started it
        ) as interrupts:
            # A signal during these seconds of imports is answered like any other.
            from ddp_runner.launch.supervisor import RanksFailedError, supervise
            from ddp_runner.worker import work

            _quiet_agent()
            try:
                result = supervise(replace(job, scratch=scratch), work)
            except RanksFailedError as error:
                return _failed(error.failure, job.run_dir)
        received = interrupts.received or signal.SIGTERM
        return Outcome(
            status=result["status"],
            exit_code=EXIT_COMPLETED if result["status"] == Status.COMPLETED else 128 + received,
            run_dir=Path(result["run_dir"]),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _failed(failure: Failure, run_dir: Path | None) -> Outcome:
    way_out = "" if failure.kind == "user" else "; go on with resume=RUN"
    if run_dir is not None:
        logs = run_dir / "logs"
        try:
            write_run_record(
                run_dir,
                status=Status.FAILED,
                finished_at=time.time(),
                error={"rank": failure.rank, "kind": failure.kind, "sentence": failure.sentence},
            )
            if failure.traceback:
                logs.mkdir(exist_ok=True)
                (logs / FAILURE_FILE).write_text(failure.traceback, encoding="utf-8")
            if way_out:
                seen = logs / FAILURE_FILE if failure.traceback else logs
                way_out = f"; see {seen}, then go on with resume=RUN"
        except (OSError, UserError) as error:
            # The cause comes first: a full disk is often both.
            way_out = f"; besides, {error}"
    exit_code = EXIT_USER_ERROR if failure.kind == "user" else EXIT_FAILED
    failure = replace(failure, sentence=failure.sentence + way_out)
    return Outcome(status=Status.FAILED, exit_code=exit_code, run_dir=run_dir, failure=failure)


def _quiet_agent() -> None:
    """Silence the agent's own report of a failure, which ours replaces, unless LOGLEVEL is set."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
