"""The composition root of one rank: the only place where config becomes objects.

Called by ``launch`` inside each worker it started, and by ``__main__`` in a worker that torchrun,
Slurm or mpirun started.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from ddp_runner.check.task import run_check
from ddp_runner.collectives.task import run_collectives
from ddp_runner.dist_env import DistEnv, dist_env
from ddp_runner.job import EXIT_COMPLETED, Job, Status
from ddp_runner.rank.session import Session, open_session
from ddp_runner.rank.stop import StopRequest, die_with_launcher
from ddp_runner.train.task import run_training


def work(job: Job) -> dict[str, Any]:
    """Run one rank of a group that ``launch`` started. The supervisor's entrypoint."""
    die_with_launcher()
    env = dist_env()
    assert env is not None
    return run(job, env)


def run_under_launcher(job: Job, env: DistEnv) -> NoReturn:
    """Run one rank that torchrun, Slurm or mpirun started, and end the process."""
    result = record(run)(job, env)
    status = result["status"] if result else Status.COMPLETED
    received = (result or {}).get("signal") or signal.SIGTERM
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's own end, which now and then aborts under gloo's threads while
    # a peer's connection closes. Forked workers end like this, too.
    os._exit(EXIT_COMPLETED if status == Status.COMPLETED else 128 + received)


def run(job: Job, env: DistEnv) -> dict[str, Any]:
    """Run the task as one rank of the gang; return status, run_dir and the signal that stopped it.

    Collective: every rank must call.

    Raises:
        UserError: the input is at fault: the data, a checkpoint, a loss that became NaN.
    """
    stop_requested = StopRequest(job.scratch, rank=env.rank, attempt=env.restart_count)
    with open_session(job, env) as session:
        status = TASKS[job.config.task](session, stop_requested)
    return {
        "status": status,
        "run_dir": str(session.run_dir),
        "signal": stop_requested.received,  # that this very rank has received
    }


# Each takes the session and whether to stop, and returns completed or preempted.
TASKS: dict[str, Callable[[Session, Callable[[], bool]], str]] = {
    "train": run_training,
    "collectives": run_collectives,
    "check": run_check,
}
