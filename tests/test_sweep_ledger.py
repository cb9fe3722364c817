"""Sweeps that are stopped, edited, shared and started again: what the ledger is for."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from commands import (
    background,
    ended,
    last_step,
    metrics,
    record,
    run_command,
    run_dirs,
    wait_for,
    write_experiment,
)

from ddp_runner.comparison.analysis import compare
from ddp_runner.comparison.runs import read_runs
from ddp_runner.ledger import LEDGER

TOY = ("model=toy", "train.log_every_steps=1", "train.num_threads=1")


def statuses(sweep: Path) -> dict[str, str]:
    """Return the status of each job in the ledger, by folder."""
    return {
        one["folder"]: one["status"] for one in json.loads((sweep / LEDGER).read_text())["jobs"]
    }


def the_sweep(folder: Path) -> Path:
    """Return the only sweep folder that commands in a folder have made."""
    (ledger,) = folder.glob(f"outputs/*/{LEDGER}")
    return ledger.parent


def table_row(stdout: str, job: str) -> list[str]:
    """Return the words of a job's line in the table."""
    (line,) = [line for line in stdout.splitlines() if line.startswith(f"{job} ")]
    return line.split()


def test_a_killed_sweep_goes_on_where_it_stood(tmp_path: Path) -> None:
    """SIGKILL in the third of five jobs: two are skipped, the third resumes, all five are done."""
    command = ("-m", "seed=0,1,2,3,4", *TOY, "train.max_steps=300", "checkpoint.every_steps=15")
    with background(*command, folder=tmp_path) as process:
        third = "outputs/*/seed=2/checkpoints/step-*"
        wait_for(lambda: list(tmp_path.glob(third)))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    sweep = the_sweep(tmp_path)
    assert list(statuses(sweep).values()) == ["done", "done", "running", "queued", "queued"]
    done = {path: (path / "run.json").stat().st_mtime_ns for path in run_dirs(sweep)[:2]}

    program = (sys.executable, "-m", "ddp_runner.sweep")
    told = run_command(str(sweep), folder=tmp_path / "elsewhere", program=program)
    assert table_row(told.stdout, "seed=2")[1] == "interrupted"

    end = run_command(*command, folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert the_sweep(tmp_path) == sweep
    assert set(statuses(sweep).values()) == {"done"}
    assert [path.name for path in run_dirs(sweep)] == [f"seed={seed}" for seed in range(5)]
    assert {path: (path / "run.json").stat().st_mtime_ns for path in done} == done
    assert "resumed from" in (sweep / "seed=2" / "logs" / "rank-0.log").read_text()
    for run_dir in run_dirs(sweep):
        assert [line["step"] for line in metrics(run_dir) if "train/loss" in line] == [
            *range(1, 301)
        ]
    rows = compare(read_runs([sweep]), each=True).rows
    assert [row.setting["seed"] for row in rows] == [0, 1, 2, 3, 4]


def test_failed_jobs_are_left_alone_until_asked_for(tmp_path: Path) -> None:
    """Started again, a failed job is told of; with sweep.retry=failed it runs, and may complete."""
    rows = ("-m", "optimizer.lr=0.1,1e30", *TOY, "train.max_steps=9", "hydra.sweep.dir=sweep")
    first = run_command(*rows, folder=tmp_path)
    sweep = tmp_path / "sweep"
    assert first.exit_code == 2
    assert statuses(sweep) == {"optimizer.lr=0.1": "done", "optimizer.lr=1e+30": "failed"}
    began = {path.name: record(path)["started_at"] for path in run_dirs(sweep)}

    again = run_command(*rows, folder=tmp_path)
    assert again.exit_code == 2
    assert {path.name: record(path)["started_at"] for path in run_dirs(sweep)} == began
    assert "smaller optimizer.lr" in again.stdout

    retried = run_command(*rows, "sweep.retry=failed", folder=tmp_path)
    assert retried.exit_code == 2
    now = {path.name: record(path)["started_at"] for path in run_dirs(sweep)}
    assert now["optimizer.lr=0.1"] == began["optimizer.lr=0.1"]
    assert now["optimizer.lr=1e+30"] > began["optimizer.lr=1e+30"]


def test_fail_fast_and_max_failures_stop_a_sweep(tmp_path: Path) -> None:
    """At the first failure, or the second: what waits stays queued, the exit code is not 0."""
    rows = ("-m", "optimizer.lr=1e30,1e31,0.1", *TOY, "train.max_steps=9")
    for number, setting in enumerate(("sweep.fail_fast=true", "sweep.max_failures=2"), start=1):
        folder = tmp_path / str(number)
        end = run_command(*rows, setting, folder=folder)
        assert end.exit_code == 2
        found = list(statuses(the_sweep(folder)).values())
        assert found == ["failed"] * number + ["queued"] * (3 - number)


def test_an_edited_yaml_changes_no_job_that_waits(tmp_path: Path) -> None:
    """Every job is composed and frozen before the first one starts."""
    write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=300")
    command = ("-m", "--config-dir", "conf", "experiment=mine", "seed=1,2,3")
    with background(*command, folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 1)
        write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=5")
        end = ended(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert [record(path)["step"] for path in end.run_dirs] == [300, 300, 300]


def test_two_launchers_share_a_sweep(tmp_path: Path) -> None:
    """Started at once on one folder: each job is run once, both end well and list all of them."""
    command = ("-m", "seed=1,2,3,4,5,6", *TOY, "train.max_steps=100", "hydra.sweep.dir=../sweep")
    folders = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        both = [stack.enter_context(background(*command, folder=one)) for one in folders]
        ends = [ended(process, one) for process, one in zip(both, folders, strict=True)]
    assert [end.exit_code for end in ends] == [0, 0]
    started = [
        line.split(": ")[1]
        for end in ends
        for line in end.stdout.splitlines()
        if line.startswith("job ") and " of 6: " in line
    ]
    assert sorted(started) == [f"seed={seed}" for seed in range(1, 7)]
    assert all(
        table_row(end.stdout, f"seed={seed}")[1] == "done" for end in ends for seed in (1, 6)
    )
