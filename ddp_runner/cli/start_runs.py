"""Starts what a composed command asks for: a run, a rank of one, or a sweep. Torch-free."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.cli.command import CommandLine, is_sweep
from ddp_runner.cli.compose import UNNAMED, parse_sweep, run_hydra
from ddp_runner.cli.plan import Invocation, job_folder, plan, shown_arguments
from ddp_runner.cli.sweeping import Jobs
from ddp_runner.config.sections import AUTO
from ddp_runner.dist_env import dist_env, launch_id, starts_our_launchers, validate_rendezvous
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import detect
from ddp_runner.host.processes import start_fork_server, stop_fork_server
from ddp_runner.job import EXIT_COMPLETED, Job
from ddp_runner.launch.launcher import is_over, launch
from ddp_runner.sweep.planner import SweepCommand
from ddp_runner.sweep.run_sweep import run_sweep
from ddp_runner.tracking.git import git_revisions, uncommitted_changes
from ddp_runner.tracking.run_folder_claim import claim_run, with_run_folder
from ddp_runner.tracking.run_record import versions


def start_runs(
    command: CommandLine, composed: DictConfig, *, started_at: float, warnings: Sequence[str]
) -> int:
    """Start the run or the sweep of a composed command, and return the exit code; see ``run``."""
    if command.only_shows:
        run_hydra(lambda _: None, shown_arguments(command, composed))
        return EXIT_COMPLETED
    env = dist_env()
    if env is not None and starts_our_launchers(env, nnodes=composed.launch.nnodes):
        env = None
    provenance = {**git_revisions(), "versions": versions()}
    # Rank 0 writes them.
    changes = uncommitted_changes(provenance) if env is None or env.is_rank_zero else ""
    invocation = Invocation(command, env, started_at, provenance, tuple(warnings), changes)
    keys = [item.key_or_group for item in command.overrides]
    if is_sweep(command, composed):
        stop_fork_server()  # if a YAML says that it is one: the jobs may run elsewhere
        if "hydra.run.dir" in keys:
            raise UserError(
                "hydra.run.dir is the folder of one run", "write hydra.sweep.dir=FOLDER"
            )
        if env is not None:
            raise UserError("-m starts its own ranks", "run a sweep without torchrun or srun")
        jobs = Jobs(composed, invocation)
        sweep = SweepCommand(
            words=command.written,
            overrides=[str(item.input_line) for item in command.overrides],
            read=partial(parse_sweep, folders=command.folders),
            common=composed,
            compose=jobs.compose,
            name_of=partial(job_folder, command=command),
            plan=jobs.plan,
        )
        return run_sweep(sweep)
    if "hydra.sweep.dir" in keys:
        raise UserError("hydra.sweep.dir is the folder of a sweep", "write hydra.run.dir=FOLDER")
    if composed.sweep.dry_run:
        raise UserError("sweep.dry_run lists the jobs of a sweep, and this is one run", "write -m")
    return _single_run(composed, invocation)


def _single_run(composed: DictConfig, invocation: Invocation) -> int:
    """Start a run, or act as a rank of one; return the exit code."""
    env = invocation.env
    os.environ.update(composed.hydra.job.env_set)
    if composed.hydra.job.env_set:
        stop_fork_server()  # a library may read its variables when it is imported
    job = plan(composed, detect(is_rank=env is not None), invocation)
    if (env.num_nodes if env else job.config.launch.nnodes) > 1:
        # Without reverse DNS torch would print a warning for each connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        stop_fork_server()  # torch reads it when it is imported
    if env is None:
        start_fork_server()
    job = replace(job, run_dir=_named_folder(composed, job))
    config = job.config
    if env is not None or config.launch.nnodes > 1:
        # Rank 0 claims the folder: it may be on another machine.
        if job.run_dir and is_over(job):
            return EXIT_COMPLETED
        if env is None:
            return launch(job).exit_code
        validate_rendezvous(env, init_method=config.launch.init_method, backend=config.backend.name)
        from ddp_runner.worker import run_under_launcher

        run_under_launcher(job, env)
    with ExitStack() as held:
        launch_ids = list(filter(None, [launch_id()]))
        run_dir, size = claim_run(job, launch_ids=launch_ids, held=held)
        return launch(with_run_folder(job, run_dir, size)).exit_code


def _named_folder(composed: DictConfig, job: Job) -> Path | None:
    """Return the run folder that resume or hydra.run.dir names; None if neither does."""
    resume, run_dir = job.config.resume, str(composed.hydra.run.dir)
    if not run_dir:
        raise UserError("hydra.run.dir is empty", "write hydra.run.dir=FOLDER, or leave it out")
    named = None if run_dir == UNNAMED else Path(run_dir).absolute()
    if resume in (None, AUTO):
        return named
    resumed = Path(resume).absolute()
    if named is not None and named.resolve() != resumed.resolve():
        raise UserError(
            f"hydra.run.dir ({named}) and resume ({resume}) name two folders",
            "leave hydra.run.dir out: a run continues in its own",
        )
    return resumed
