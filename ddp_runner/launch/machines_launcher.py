"""Runs this machine's ranks of a job on several machines; see ``supervisor``.

Torch is imported here: its rendezvous and its agent decide which machines take part.
"""

import logging
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ddp_runner.host.processes import start_fork_server
from ddp_runner.host.streams import print_line
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Failure, Job, Outcome, Status
from ddp_runner.launch.stop_requests import StopRequests, mark_ended
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import starting_lines
from ddp_runner.tracking.trackers.start import followed


def run_worker_group(job: Job, trackers: ExitStack) -> Outcome:
    """Start this machine's ranks, wait for their end, and return how they ended.

    Args:
        job: to run.
        trackers: gets those of a run whose rank 0 is on this machine.
    """
    start_fork_server()
    print_line(starting_lines(job), stream=sys.stdout)  # before torch, which takes seconds
    # With one store for rendezvous and process group, a restarted worker group now and then finds
    # the keys of the killed one, and fails.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(
        prefix="job-", dir=temp_folder(), ignore_cleanup_errors=True
    ) as folder:
        claimed = [job.run_dir] if job.run_dir else []  # else rank 0 names it
        stop = StopRequests(running=lambda: claimed)

        def note_run(folder: Path, has_rank_zero: bool) -> list[int]:
            claimed.append(folder)
            run_dir = RunDir(folder)
            return trackers.enter_context(followed(job, run_dir)) if has_rank_zero else []

        stop.may_save = True  # the first signal is a request, also while the machines meet
        with stop.handled():
            # Inside the block: a signal during these seconds of imports is handled like any other.
            from ddp_runner.launch.supervisor import supervise

            _quiet_agent()
            result = supervise(replace(job, temp=Path(folder)), stop, note_run)
            run_dir = claimed[-1] if claimed else None
            if isinstance(result, Failure):
                return Outcome(Status.FAILED, EXIT_FAILED, run_dir, result)
    received = stop.received or signal.SIGTERM
    if result is None:
        stop.say(is_training=False)
        if run_dir is not None and RunDir(run_dir).record.exists():
            mark_ended(run_dir)
        return Outcome(Status.PREEMPTED, 128 + received, run_dir)
    exit_code = EXIT_COMPLETED if result["status"] == Status.COMPLETED else 128 + received
    return Outcome(result["status"], exit_code, Path(result["run_dir"]))


def _quiet_agent() -> None:
    """Silence the agent's own failure report, which ours replaces, unless LOGLEVEL is set."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
