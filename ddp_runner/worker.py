"""The entry point of a rank: it opens the session and runs the task that the config names."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from ddp_runner.check.check_task import run_check
from ddp_runner.collectives.collectives_task import run_collectives
from ddp_runner.dist_env import DistEnv, dist_env
from ddp_runner.host.wire import StopRequest
from ddp_runner.inference.evaluate import run_evaluation
from ddp_runner.inference.export import run_export
from ddp_runner.inference.predict import run_prediction
from ddp_runner.inference.sample import run_sampling
from ddp_runner.job import COMPLETED, Job, Outcome, Status
from ddp_runner.own_loop.own_task import run_own_loop
from ddp_runner.planning.plan_task import run_plan
from ddp_runner.rank.session import Session, open_session
from ddp_runner.train.train_task import run_training

# (session, stop_requested) -> completed or preempted.
TASKS: dict[str, Callable[[Session, Callable[[], bool]], Status]] = {
    "train": run_training,
    "evaluate": run_evaluation,
    "predict": run_prediction,
    "export": run_export,
    "sample": run_sampling,
    "collectives": run_collectives,
    "check": run_check,
    "plan": run_plan,
}


def run_task(job: Job, env: DistEnv | None = None) -> Outcome:
    """Run the job's task as one rank; `env` is read from the environment if None. Collective."""
    env = env or dist_env()
    assert env is not None
    stop_requested = StopRequest(job.wire)
    task = TASKS.get(job.config.task, run_own_loop)  # any other name is the user's own function
    with open_session(job, env) as session:
        status = task(session, stop_requested)
        signum = stop_requested.received
        if signum is not None and job.wire is not None and not job.wire.stop:
            session.log(f"rank {env.rank} alone received {signal.Signals(signum).name}")
    return COMPLETED if status == Status.COMPLETED else Outcome.stopped(signum or signal.SIGTERM)


def run_under_launcher(job: Job, env: DistEnv) -> NoReturn:
    """Run a rank that torchrun, Slurm or mpirun started, and end the process."""
    outcome = record(run_task)(job, env) or COMPLETED  # None after sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: it sometimes aborts in gloo's threads while a peer's
    # connection closes. Ranks of our own launcher end in the same way.
    os._exit(outcome.exit_code)
