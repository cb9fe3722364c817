"""Sweeps by the real command: failed jobs, stopped ones, and two at a time."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import TIME_LIMIT_S, background, run_command, session_pids, wait_for, wait_for_end
from configs import write_experiment
from run_folders import checkpoint_steps, last_step, record, run_dirs

TOY = ("model=toy", "train.max_steps=3", "train.log_every_steps=1")


def test_a_job_that_fails_never_stops_the_others(tmp_path: Path) -> None:
    """Rejected, diverged and crashed jobs are named in the table; the rest complete."""
    rows = {
        "rejected": ("parallelism=single", "world_size=2"),
        "first": (),
        "too_small": ("dataset.num_samples=1", "batch.global_size=2"),
        "crashed": (
            "model._target_=torch.nn.Linear",
            "model.in_features=3",
            "model.out_features=5",
        ),
        "diverged": ("optimizer.lr=1e30", "checkpoint.every_steps=1", "train.max_steps=9"),
        "last": ("world_size=1",),
    }
    for name, overrides in rows.items():
        write_experiment(tmp_path / "conf", name, *TOY, *overrides)
    end = run_command(
        *("-m", "--config-dir", "conf", f"experiment={','.join(rows)}", "seed=0"), folder=tmp_path
    )
    assert end.exit_code == 2
    (sweep,) = (tmp_path / "outputs").iterdir()
    folders = {f"experiment={name}" for name in rows}
    # Nothing of these is there but a line in the plan.
    rejected = {"experiment=rejected", "experiment=too_small"}
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == folders - rejected
    status = {path.name: record(path)["status"] for path in run_dirs(sweep)}
    for folder in folders:
        name = folder.removeprefix("experiment=")
        completed = name in ("first", "last")
        assert status.get(folder, "failed") == ("completed" if completed else "failed")
        (row,) = [line for line in end.stdout.splitlines() if line.startswith(f"{folder} ")]
        assert row.split()[1] == ("completed" if completed else "failed")
    for name, reason in {
        "rejected": "parallelism=single runs 1 process, world_size is 2",
        "too_small": "dataset=random has 1 training samples and world_size is 2",
        "crashed": "RuntimeError",
        "diverged": "smaller optimizer.lr",
    }.items():
        (message,) = [
            one for one in end.stdout.splitlines() if one.startswith(f"experiment={name}:")
        ]
        assert reason in message
    diverged = sweep / "experiment=diverged"
    assert record(diverged)["error"]["kind"] == "user"
    broken = int(re.findall(r"became .* by step (\d+)", record(diverged)["error"]["sentence"])[0])
    assert not [step for step in checkpoint_steps(diverged) if step >= broken]  # never saved


@pytest.mark.full
def test_two_sweeps_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    """They start at once; each has its own folder and ports, and completes."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                background(*("-m", "world_size=1,2", f"seed={seed}", *TOY), folder=tmp_path)
            )
            for seed in (1, 2)
        ]
        assert [process.wait(TIME_LIMIT_S) for process in both] == [0, 0]
    sweeps = list((tmp_path / "outputs").iterdir())
    assert len(sweeps) == 2
    for sweep in sweeps:
        assert [path.name for path in run_dirs(sweep)] == ["world_size=1", "world_size=2"]
        assert [record(path)["status"] for path in run_dirs(sweep)] == ["completed"] * 2
        assert len({record(path)["config_hash"] for path in run_dirs(sweep)}) == 2


@pytest.mark.full
def test_ctrl_c_stops_the_jobs_that_wait_as_well(tmp_path: Path) -> None:
    """The job that runs is saved; those after it never start; the table has the first."""
    with background(
        *("-m", "seed=1,2,3", "model=toy", "train.epochs=10000", "train.log_every_steps=1"),
        folder=tmp_path,
    ) as process:
        wait_for(lambda: last_step(tmp_path) >= 3)
        os.kill(process.pid, signal.SIGINT)
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: not session_pids(process.pid))
    assert end.exit_code == 130
    assert "the same command continues this sweep" in end.stdout
    assert end.run_dir.name == "seed=1"
    assert record(end.run_dir)["status"] == "preempted"
    assert checkpoint_steps(end.run_dir)[-1] == record(end.run_dir)["step"]
    assert [line for line in end.stdout.splitlines() if line.startswith("seed=1 ")]
