"""Grids by the real command: globs and ranges, jobs that are left out, calibration, the report."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CommandResult, run_command
from configs import write_experiment
from omegaconf import OmegaConf
from run_folders import record, run_dirs
from sweeps import only_sweep, statuses, table_row

TOY = ("train.max_steps=3", "train.num_threads=1", "backend=gloo")


@pytest.mark.full
def test_a_grid_leaves_out_what_the_rules_reject_and_reports(tmp_path: Path) -> None:
    """Skipped jobs are listed with a reason; one calibration for each world size; all are compared.

    A job's evaluation is the same for any number of ranks.
    """
    end = run_command(
        *(
            "-m",
            "model=glob(toy*,exclude=toy_slow)",
            "seed=range(1,3)",
            "world_size=1,2",
            "scaling=strong",
            *TOY,
        ),
        *("sweep.skip_invalid=true", "sweep.calibrate=true", "sweep.report=true"),
        folder=tmp_path,
    )
    assert (end.exit_code, end.stderr) == (0, "")
    sweep = only_sweep(tmp_path)
    jobs = {
        f"model={model},seed={seed},world_size={size}"
        for model in ("toy", "toy_mp")
        for seed in (1, 2)
        for size in (1, 2)
    }
    skipped = {name for name in jobs if "toy_mp" in name}
    calibration = "calibration,world_size=2,backend=gloo"
    by_job = statuses(sweep)
    assert {name for name, status in by_job.items() if status == "skipped"} == skipped
    assert {name for name, status in by_job.items() if status == "completed"} == {
        calibration,
        *(jobs - skipped),
    }
    for name in skipped:
        assert table_row(end.stdout, name)[1] == "skipped"
        assert f"{name}: model=toy_mp is cut into 2 stages and parallelism=ddp" in end.stdout
        assert not (sweep / name).exists()

    assert not list((sweep / calibration).glob("events.out.tfevents.*"))
    measured = record(sweep / calibration)
    assert {(row["op"], row["dtype"]) for row in measured["collectives"]} == {
        ("all_reduce", "float32")
    }
    sizes = [row["bytes"] for row in measured["collectives"]]
    assert (sizes[0], sizes[-1]) == (4 * 2**10, 64 * 2**20)
    runs = [record(run_dir) for run_dir in run_dirs(sweep)]
    assert min(runs, key=lambda one: one["started_at"]) == measured
    for name in jobs - skipped:
        alone = name.replace("world_size=2", "world_size=1")
        losses = [record(sweep / one)["metrics"]["eval/loss"] for one in (name, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    report = json.loads((sweep / "report" / "comparison.json").read_text())
    assert len(report["rows"]) == 2  # a row for both seeds
    assert end.stdout.count("4 runs compared") == 1
    assert end.stdout.index("tensorboard --logdir outputs/sweep") < end.stdout.index("4 runs")


def test_what_hydra_rejects_in_a_job_is_that_jobs_fault(
    answer_to: Callable[..., CommandResult],
) -> None:
    """A value of another type, an option that does not exist, an interpolation to nothing."""
    end = answer_to(
        *("-m", "model=toy,convnet", "dataset=random", "seed=1,x", "optimizer=sgd,nope"),
        *("sweep.dry_run=true", "sweep.skip_invalid=true"),
    )
    assert (end.exit_code, end.stderr) == (0, "")
    assert "1 valid job, 7 invalid jobs" in end.stdout
    for line in (
        "model=toy,seed=x,optimizer=sgd: seed (x) must be a whole number",
        "model=toy,seed=1,optimizer=nope: optimizer=nope does not exist; options: adadelta, ",
        "model=convnet,seed=1,optimizer=sgd: model.num_classes comes from dataset.num_classes, ",
    ):
        assert f"\n{line}" in end.stdout


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("sed=1,2", "error: sed is not a key of the config; did you mean seed?\n"),
        (
            "seed=range(0)",
            "error: the sweep has no jobs: a range is empty; write range(3) or 1,2\n",
        ),
        ("hydra.sweep.dir=", "error: hydra.sweep.dir is empty; write hydra.sweep.dir=FOLDER, or "),
        (
            "hydra.run.dir=x",
            "error: hydra.run.dir is the folder of one run; write hydra.sweep.dir=",
        ),
    ],
)
def test_a_mistake_in_the_whole_command_is_one_line(
    key: str, line: str, tmp_path: Path, answer_to: Callable[..., CommandResult]
) -> None:
    """Nothing else is printed and no folder is left, also by a dry run."""
    end = answer_to("-m", "model=toy", key, "sweep.dry_run=true")
    assert (end.exit_code, end.stdout) == (2, "")
    assert end.stderr.startswith(line)
    assert end.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_jobs_whose_names_are_equal_are_each_told_when_they_are_invalid(tmp_path: Path) -> None:
    """Long numbers are rounded in a name."""
    rates = "optimizer.lr=-1.000001,-1.0000012"
    end = run_command("-m", "model=toy", rates, folder=tmp_path)
    assert end.exit_code == 2
    assert statuses(only_sweep(tmp_path)) == {
        "optimizer.lr=-1": "failed",
        "optimizer.lr=-1-2": "failed",
    }


TO_SUBMIT = ("hydra/launcher=slurm", "hydra.launcher.submit=false")
NODES = ("hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_node=2")


@pytest.mark.parametrize("launcher", [(), (*TO_SUBMIT, *NODES)])
def test_rejected_alone_is_an_error_still(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """A grid of which nothing is left has no exit code of its jobs; without a run no report."""
    end = run_command(
        *("-m", "model=toy_mp", "seed=1,2", "sweep.skip_invalid=true", "sweep.report=true"),
        *launcher,
        folder=tmp_path,
    )
    assert end.exit_code == 2
    assert end.stderr.startswith("error: every job of the sweep is invalid and was skipped")
    assert "no report: no run of this sweep was completed" in end.stdout


@pytest.mark.full
def test_an_experiment_brings_its_own_grid(tmp_path: Path) -> None:
    """It needs no -m; a key that the command line gives replaces the experiment's."""
    write_experiment(tmp_path / "conf", "study", "model=toy", *TOY[:2], "name=my_study")
    path = tmp_path / "conf" / "experiment" / "study.yaml"
    params = {"scaling": "strong,weak", "world_size": "1,2", "seed": "0,1"}
    grid = OmegaConf.create({"hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}})
    path.write_text(path.read_text() + OmegaConf.to_yaml(grid))
    words = ("--config-dir", "conf", "experiment=study", "world_size=2", "seed=2,3")
    assert run_command(*words, folder=tmp_path).exit_code == 0
    sweep = only_sweep(tmp_path)
    assert sweep.name.startswith("my_study-")
    batches = {
        run_dir.name: OmegaConf.load(run_dir / ".hydra" / "config.yaml").batch
        for run_dir in run_dirs(sweep)
    }
    assert batches.keys() == {
        f"scaling={kind},seed={seed}" for kind in ("strong", "weak") for seed in (2, 3)
    }
    for name, batch in batches.items():
        strong = name.startswith("scaling=strong")
        assert (batch.global_size, batch.per_rank) == ((128, 64) if strong else (256, 128))
        assert record(sweep / name)["world_size"] == 2
