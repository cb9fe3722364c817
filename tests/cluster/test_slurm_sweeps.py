"""Sweeps on a real Slurm: their jobs outlive the command, a preemption and a cancellation."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from clusters import needs
from commands import Started, background, wait_for, wait_for_end
from run_folders import checkpoint_steps, last_step, rank_log, record, run_dirs
from slow_models import TOY, slow_models
from slurm_cluster import PROGRAMS, Slurm, slurm
from sweeps import only_sweep, statuses, table_row

pytestmark = needs(*PROGRAMS)
SWEEP = ("-m", "hydra/launcher=slurm")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Give two nodes of two cores."""
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def start(
    cluster: Slurm, *arguments: str, folder: Path, environ: dict[str, str] | None = None
) -> AbstractContextManager[Started]:
    """Start a sweep on the login host."""
    return background(
        *(*SWEEP, *arguments),
        folder=folder,
        environ={**cluster.environ, **(environ or {})},
        prepare=cluster.login.enter,
    )


def numbers(cluster: Slurm) -> set[str]:
    """Return every job of a sweep that Slurm knows, in its queue or ended."""
    shown = cluster.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %j").splitlines()
    return {line.split()[0] for line in shown if " sweep" in line}


@pytest.mark.slow
def test_a_sweep_of_several_shapes_outlives_its_command(cluster: Slurm, tmp_path: Path) -> None:
    """Killed and given again, the command submits nothing twice and collects every result."""
    before = numbers(cluster)
    grid = ("model=toy", "world_size=1,2", "launch.nproc_per_node=1", "seed=1,2,3")
    arguments = (*grid, "train.max_steps=5", "hydra.launcher.cpus_per_task=2")
    with start(cluster, *arguments, folder=tmp_path) as process:
        wait_for(lambda: len(numbers(cluster) - before) == 6)
        wait_for(lambda: "running" in statuses(only_sweep(tmp_path)).values())
        process.kill()
        process.wait()
    sweep = only_sweep(tmp_path)
    assert "queued" in statuses(sweep).values()
    with start(cluster, *arguments, folder=tmp_path) as process:
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert only_sweep(tmp_path) == sweep
    assert len(numbers(cluster) - before) == 6
    assert set(statuses(sweep).values()) == {"completed"}
    assert len(run_dirs(sweep)) == 6
    for run_dir in run_dirs(sweep):
        fields, ranks = record(run_dir), int(run_dir.name.partition(",")[0][-1])
        assert (fields["status"], fields["num_nodes"]) == ("completed", ranks)
        assert len(fields["sessions"]) == 1
        assert fields["num_threads"] == 2
        assert table_row(end.stdout, run_dir.name)[1] == "completed"


@pytest.mark.slow
def test_a_preempted_job_completes_and_a_cancelled_one_is_noticed(
    cluster: Slurm, tmp_path: Path
) -> None:
    """Slurm queues the first again; of the second, the table tells how it goes on."""
    slow = slow_models(tmp_path / "models")
    arguments = (*TOY, "world_size=2", "launch.nproc_per_node=1", "seed=1,2", "train.max_steps=600")
    with start(cluster, *arguments, folder=tmp_path, environ=slow.environ) as process:
        wait_for(lambda: len(run_dirs(tmp_path)) == 2 and last_step(tmp_path) >= 1)
        sweep = only_sweep(tmp_path)
        one, other = (job for job in sorted(numbers(cluster)) if is_running(cluster, job))
        cluster.run("scancel", other)
        urgent = cluster.submit(
            *("-p", "urgent", "-N2", "--ntasks-per-node=2", "--wrap", "true"), folder=tmp_path
        )
        wait_for(lambda: sorted(statuses(sweep).values()) == ["preempted", "preempted"])
        cluster.wait(urgent)
        slow.release()
        cluster.start_again(one)
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 128 + signal.SIGTERM
    completed, cancelled = run_dirs(sweep)
    assert statuses(sweep) == {completed.name: "completed", cancelled.name: "preempted"}
    name = cluster.run("squeue", "-h", "-r", "-t", "all", "-j", other, "-o", "%j_%K").strip()
    assert f"Slurm's job {name} was cancelled; the same command continues it" in end.stdout
    assert "resumed from" in rank_log(completed)
    assert record(completed)["step"] == 600
    assert checkpoint_steps(cancelled)[-1] == record(cancelled)["step"] < 600


def is_running(cluster: Slurm, job: str) -> bool:
    """Return whether Slurm runs a job."""
    return cluster.fact(job, "JobState") == "RUNNING"


@pytest.mark.slow
def test_a_failure_cancels_the_other_jobs_and_ctrl_c_leaves_them(
    cluster: Slurm, tmp_path: Path
) -> None:
    """What is cancelled saves a checkpoint, as after any SIGTERM."""
    slow = slow_models(tmp_path / "models")
    jobs = ("optimizer.lr=0.01,1e30", "sweep.fail_fast=true")
    arguments = (*TOY, *jobs, "world_size=1", "train.max_steps=10000", "train.log_every_steps=1")
    before = numbers(cluster)
    with start(cluster, *arguments, folder=tmp_path, environ=slow.environ) as process:
        wait_for(lambda: len(numbers(cluster) - before) == 2)
        os.kill(process.pid, signal.SIGINT)
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 130
    assert "SIGINT: leaving 2 jobs to Slurm; Ctrl-C again within 5 s cancels them" in end.stdout
    with start(cluster, *arguments, folder=tmp_path, environ=slow.environ) as process:
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 2
    assert len(numbers(cluster) - before) == 2
    assert "enough jobs have failed: cancelling 1 more" in end.stdout
    assert "error: train/loss became" in end.stderr
    sweep = only_sweep(tmp_path)
    assert statuses(sweep) == {"optimizer.lr=0.01": "preempted", "optimizer.lr=1e+30": "failed"}
