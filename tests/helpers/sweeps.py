"""Sweeps: a small one of stand-ins; and of real commands the folder, the table, the jobs."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import rank_logs
from configs import resolved
from run_folders import last_step

from ddp_runner.config.sections import SweepConfig
from ddp_runner.host import hardware
from ddp_runner.job import Job
from ddp_runner.sweep.jobs import JobBatch, SweepJob, num_sessions
from ddp_runner.sweep.sweep_dir import (
    PLAN,
    PlannedJob,
    change_plan,
    read_plan,
    restarted,
    with_jobs,
)

POLL_S = 0.2  # more often would take too much of the cores
needs_two_cores = pytest.mark.skipif(hardware.detect().num_cores < 2, reason="needs two cores")


def only_sweep(folder: Path) -> Path:
    """Return the only sweep folder that commands in a folder have made."""
    (plan,) = folder.glob(f"outputs/*/{PLAN}")
    return plan.parent


def statuses(sweep: Path) -> dict[str, str]:
    """Return how each job stands, by folder; whatever a job that is alive does, it runs."""
    found = {one.folder: one.standing(sweep) for one in read_plan(sweep).jobs.values()}
    return {name: "running" if one.is_alive else one.status for name, one in found.items()}


def planned(sweep: Path, *names: str, command: Sequence[str] = ("mine",)) -> None:
    """Write the plan of a sweep that has restarted, with jobs of these names."""
    sweep.mkdir(parents=True, exist_ok=True)
    change_plan(sweep, lambda plan: restarted(command, plan))
    jobs = [PlannedJob(name, name) for name in names]
    change_plan(sweep, lambda plan: with_jobs(jobs, plan))
    for name in names:
        (sweep / name).mkdir(exist_ok=True)


def batch_of(sweep: Path, *names: str, world_size: int = 1, **settings: Any) -> JobBatch:
    """Return the jobs of these names, which are in the plan, as a command has queued them."""
    config, _ = resolved("model=toy", f"world_size={world_size}")
    plan, jobs = read_plan(sweep), dict[str, SweepJob]()
    for name in names:
        job = Job(config, 0.0, {}, run_dir=sweep / name, title=f"job {name}")
        found = plan.jobs[name].standing(sweep)
        sessions = num_sessions(found) if found.status == "failed" else 0
        jobs[name] = SweepJob(plan.jobs[name], job, sweep, sessions)
    return JobBatch(jobs, SweepConfig(**settings))


def table_row(stdout: str, job: str) -> list[str]:
    """Return the words of a job's line in the table."""
    (line,) = [line for line in stdout.splitlines() if line.startswith(f"{job} ")]
    return line.split()


def both_train(
    process: subprocess.Popen[str], folder: Path, *, beyond: Mapping[str, int] | None = None
) -> bool:
    """Return whether two jobs run, each beyond a step; fail if the command has ended.

    Args:
        process: the sweep's command.
        folder: where it was started.
        beyond: the step of each job, by folder name; 0 where it is missing.
    """
    assert process.poll() is None, (folder / "stderr").read_text()
    running = {log.parent.parent for log, _ in rank_logs(process.pid)}
    return len(running) == 2 and all(
        last_step(run_dir) > (beyond or {}).get(run_dir.name, 0) for run_dir in running
    )
