"""Sweeps that are stopped, edited, shared and started again."""

import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import background, run_command, wait_for, wait_for_end
from configs import resolved, write_experiment
from run_folders import last_step, metrics, record, run_dirs
from sweeps import only_sweep, statuses, table_row
from tiers import first_of

from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.plan import Invocation
from ddp_runner.cli.sweeping import Jobs
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.config.identity import config_hash
from ddp_runner.config.schema import Config
from ddp_runner.job import Job
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.planner import Planner, SweepCommand
from ddp_runner.sweep.survey import run_status
from ddp_runner.tracking.run_record import write_run_record

TOY = ("model=toy", "train.log_every_steps=1", "train.num_threads=1")


@pytest.mark.full
def test_a_killed_sweep_goes_on_where_it_stood(tmp_path: Path) -> None:
    """It is killed in the second of three jobs: the first is skipped, the second resumes."""
    command = ("-m", "seed=0,1,2", *TOY, "train.max_steps=100", "checkpoint.every_steps=15")
    with background(*command, folder=tmp_path) as process:
        second = "outputs/*/seed=1/checkpoints/step-*"
        wait_for(lambda: list(tmp_path.glob(second)))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    sweep = only_sweep(tmp_path)
    assert list(statuses(sweep).values()) == ["completed", "lost", "queued"]
    done = {path: (path / "run.json").stat().st_mtime_ns for path in run_dirs(sweep)[:1]}

    program = (sys.executable, "-m", "ddp_runner.sweep")
    message = run_command(str(sweep), folder=tmp_path / "elsewhere", program=program)
    assert table_row(message.stdout, "seed=1")[1] == "lost"

    end = run_command(*command, folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert only_sweep(tmp_path) == sweep
    assert set(statuses(sweep).values()) == {"completed"}
    assert [path.name for path in run_dirs(sweep)] == [f"seed={seed}" for seed in range(3)]
    assert {path: (path / "run.json").stat().st_mtime_ns for path in done} == done
    assert "resumed from" in (sweep / "seed=1" / "logs" / "rank-0.log").read_text()
    for run_dir in run_dirs(sweep):
        assert [line["step"] for line in metrics(run_dir) if "train/loss" in line] == [
            *range(1, 101)
        ]
    rows = compare(read_runs([sweep]), each=True).rows
    assert [row.setting["seed"] for row in rows] == [0, 1, 2]


@pytest.mark.full
def test_failed_jobs_are_left_alone_until_asked_for(tmp_path: Path) -> None:
    """A new start reports a failed job; with sweep.retry=failed it runs the job again."""
    rows = ("-m", "optimizer.lr=0.1,1e30", *TOY, "train.max_steps=9", "hydra.sweep.dir=sweep")
    first = run_command(*rows, folder=tmp_path)
    sweep = tmp_path / "sweep"
    assert first.exit_code == 2
    assert "the same command with sweep.retry=failed runs 1 failed job again" in first.stdout
    assert statuses(sweep) == {"optimizer.lr=0.1": "completed", "optimizer.lr=1e+30": "failed"}
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


@pytest.mark.parametrize(
    ("setting", "number"), first_of([("sweep.max_failures=2", 2), ("sweep.fail_fast=true", 1)])
)
def test_fail_fast_and_max_failures_stop_a_sweep(setting: str, number: int, tmp_path: Path) -> None:
    """After the first or second failure, waiting jobs stay queued, and the exit code is not 0."""
    rows = ("-m", "optimizer.lr=1e30,1e31,0.1", *TOY, "train.max_steps=9")
    end = run_command(*rows, setting, folder=tmp_path)
    assert end.exit_code == 2
    ends = list(statuses(only_sweep(tmp_path)).values())
    assert ends == ["failed"] * number + ["queued"] * (3 - number)


@pytest.mark.slow
@pytest.mark.full
def test_an_edited_yaml_changes_no_job_that_waits(tmp_path: Path) -> None:
    """Every job is composed and frozen before the first one starts."""
    write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=300")
    command = ("-m", "--config-dir", "conf", "experiment=mine", "seed=1,2,3")
    with background(*command, folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 1)
        write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=5")
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert [record(path)["step"] for path in end.run_dirs] == [300, 300, 300]


@pytest.mark.full
def test_jobs_that_an_edited_yaml_no_longer_makes_are_left_out(tmp_path: Path) -> None:
    """Otherwise no start would ever end the sweep; ended jobs stay in its table."""
    write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=2")
    sweep = tmp_path / "sweep"
    command = ("-m", "--config-dir", "conf", "experiment=mine", f"hydra.sweep.dir={sweep}")
    assert run_command(*command, "seed=1,2,3,4", folder=tmp_path).exit_code == 0
    for name in ("seed=2", "seed=4"):  # killed
        write_run_record(sweep / name, status="running")
    (sweep / "seed=3" / "run.json").unlink()  # it waits
    write_experiment(tmp_path / "conf", "mine", *TOY, "train.max_steps=3")
    dry = run_command(*command, "seed=1,2,3", "sweep.dry_run=true", folder=tmp_path)
    end = run_command(*command, "seed=1,2,3", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    said = "changed since this sweep began: train.max_steps; so these are new jobs: seed=1-2 in"
    changed = f"{said} place of seed=1; seed=2-2 in place of seed=2; seed=3"
    assert changed in end.stdout
    assert "no longer made by the sweep's command: seed=4" in end.stdout
    assert changed in dry.stdout
    names = ("seed=1", "seed=1-2", "seed=2-2", "seed=3")
    assert statuses(sweep) == dict.fromkeys(names, "completed")
    run = run_status(sweep / "seed=2")
    assert (run.status, run.is_missing, run.is_shown) == ("lost", False, False)
    assert run.reason is not None
    assert "no longer a job of its sweep; continue with " in run.reason


@pytest.mark.full
def test_two_launchers_share_a_sweep(tmp_path: Path) -> None:
    """They start at once on one folder: each job runs once, and both end well and list all jobs."""
    command = ("-m", "seed=1,2,3,4,5,6", *TOY, "train.max_steps=100", "hydra.sweep.dir=../sweep")
    folders = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        both = [stack.enter_context(background(*command, folder=one)) for one in folders]
        ends = [wait_for_end(process, one) for process, one in zip(both, folders, strict=True)]
    assert [end.exit_code for end in ends] == [0, 0]
    started = [
        line.split(": ")[1]
        for end in ends
        for line in end.stdout.splitlines()
        if re.fullmatch(r"job \d of 6: \S+", line)
    ]
    assert sorted(started) == [f"seed={seed}" for seed in range(1, 7)]
    assert all(
        table_row(end.stdout, f"seed={seed}")[1] == "completed" for end in ends for seed in (1, 6)
    )


def test_an_invalid_job_counts_as_a_failure(tmp_path: Path) -> None:
    """Under fail_fast, no other job starts."""
    rows = ("-m", "optimizer.lr=0.1,-1", *TOY, "sweep.fail_fast=true")
    end = run_command(*rows, folder=tmp_path)
    assert end.exit_code == 2
    by_job = statuses(only_sweep(tmp_path))
    assert by_job == {"optimizer.lr=0.1": "queued", "optimizer.lr=-1": "failed"}


def test_a_folder_with_a_run_of_another_config_is_left_alone(tmp_path: Path) -> None:
    """The plan may have been deleted; a run of the same config is found again."""
    sweep = tmp_path / "mine"

    def of_seed(seed: int) -> Config:
        return resolved("model=toy", f"seed={seed}")[0]

    for folder, seed in (("seed=1", 9), ("seed=2", 2)):
        hashed = config_hash(of_seed(seed))
        write_run_record(sweep / folder, status="completed", config_hash=hashed)
    command = parse(["-m", "model=toy", "seed=1,2"])
    common = compose(command)
    planner = Planner(
        SweepCommand(
            words=["-m"],
            overrides=(),
            read=lambda words: [],
            common=common,
            compose=Jobs(common, Invocation(command, None, 0.0, {})).compose,
            name_of=lambda composed: f"seed={composed.seed}",
            plan=lambda composed, _: Job(
                resolved("model=toy", f"seed={composed.seed}")[0], 0.0, {}
            ),
        ),
        sweep,
        Local(),
        is_search=False,
    )
    drafts = [*planner.draft([["model=toy", "seed=1"], ["model=toy", "seed=2"]], range(2))]
    assert [one.planned.folder for one in drafts] == ["seed=1-2", "seed=2"]
