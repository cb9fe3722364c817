"""The command ``python -m ddp_runner``, on its own or in each worker of torchrun, srun or mpirun.

Reads the command line, composes the config with Hydra, resolves and validates it without importing
torch, and claims the run folder. Then ``launch`` starts the ranks; where this process is a rank
already, ``worker`` runs its part.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from omegaconf import DictConfig

from ddp_runner.cli.command_line import parse
from ddp_runner.cli.compose import UNNAMED, Invocation, compose, is_sweep, job_folder, plan
from ddp_runner.cli.hydra_adapter import FULL_ERROR, is_grid, quoted, run_hydra
from ddp_runner.cli.hydra_errors import user_error
from ddp_runner.cli.run_folder import asked_folder, goes_on, new_folder
from ddp_runner.dist_env import DistEnv, dist_env, validate_rendezvous
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import detect
from ddp_runner.host.processes import handled_signals, start_fork_server
from ddp_runner.host.streams import keep_streams
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Job
from ddp_runner.launch.launcher import launch, print_error
from ddp_runner.sweep.multirun import Sweep, sweep_dir
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import git_revision, versions


def main() -> None:
    """Run the command line; exit with one of the codes that the README lists."""
    started_at = time.time()
    lost: list[str] = []  # what is wrong with stdout and stderr
    keep_streams(lost.append)
    for signum in handled_signals():
        signal.signal(signum, _leave)  # before any worker: there is nothing to save
    arguments = ["verbose=true" if one == "-v" else one for one in sys.argv[1:]]
    try:
        sys.exit(run(arguments, started_at=started_at, warnings=lost))
    except Exception as error:
        if "COMP_LINE" in os.environ:  # a message would land in the line that is being completed
            sys.exit(EXIT_USER_ERROR)
        explained = user_error(error, arguments)
        if explained is None or FULL_ERROR in os.environ:
            raise
        print_error(str(explained))
        sys.exit(EXIT_USER_ERROR)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def run(arguments: Sequence[str], *, started_at: float, warnings: Sequence[str] = ()) -> int:
    """Run a command: one run, a sweep of runs, or one rank's part of a run; return the exit code.

    Args:
        arguments: what follows the program's name.
        started_at: time.time() when the command began.
        warnings: to be printed with those about the config.

    Raises:
        UserError: the command or the config is invalid.
        HydraException, OmegaConfBaseException: Hydra cannot compose the config; see
            ``hydra_errors``.
    """
    command = parse(arguments)
    composed = compose(command)
    if command.only_shows:
        run_hydra(lambda _: None, command.arguments)
        return EXIT_COMPLETED
    env = dist_env()
    code = {"git_revision": git_revision(), "versions": versions()}
    invocation = Invocation(command, env, started_at, code, tuple(warnings))
    if is_sweep(command, composed):
        return _run_sweep(composed, invocation)
    os.environ.update(composed.hydra.job.env_set)
    job = plan(composed, detect(), invocation)
    if env is None:
        start_fork_server()  # as early as can be: it imports torch while this process goes on
    asked = asked_folder(composed, job)
    if env is not None or job.config.launch.nnodes > 1:
        # Rank 0 claims the folder, since this process may not be on its machine.
        return _run_elsewhere(replace(job, run_dir=asked), env)
    run_dir = RunDir(asked or new_folder(job))
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.ensure_writable()
        with run_dir.locked():
            if goes_on(job, run_dir):
                composed.resume = str(run_dir)
                job = plan(composed, detect(), invocation)
            return launch(replace(job, run_dir=run_dir.path)).exit_code
    except UserError:
        run_dir.discard_unused()  # it may have been made just now
        raise


def _run_elsewhere(job: Job, env: DistEnv | None) -> int:
    """Run a job as one of its ranks, or as the launcher of one of its machines."""
    if env is not None:
        from ddp_runner.worker import run_under_launcher

        config = job.config
        validate_rendezvous(env, init_method=config.launch.init_method, backend=config.backend.name)
        run_under_launcher(job, env)
    return launch(job).exit_code


def _run_sweep(composed: DictConfig, invocation: Invocation) -> int:
    """Let Hydra's sweeper compose the jobs, and run them batch by batch."""
    command = invocation.command
    if invocation.env is not None:
        raise UserError("-m starts its own workers; run a sweep without torchrun or srun")

    asked = None if composed.hydra.sweep.dir == UNNAMED else Path(composed.hydra.sweep.dir)
    is_search = not is_grid(composed.hydra.sweeper)
    with sweep_dir(composed, asked, command.written, is_search=is_search) as folder:
        sweep = Sweep(
            folder,
            command.written,
            is_search=is_search,
            plan=partial(plan, invocation=invocation),
            name_of=partial(job_folder, command=command),
        )
        given = [f"hydra.sweep.dir={quoted(str(folder))}", *command.arguments]
        return sweep.run(partial(run_hydra, arguments=given))
