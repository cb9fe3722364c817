"""Which checkpoints stay, which one is the best, and what a run leaves of it: by real commands."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Ended, metrics, record, run_command, steps, write_experiment
from safetensors import safe_open
from safetensors.torch import load_file

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.metric_names import MONITORS

TOY = ("model=toy", "train.num_threads=1", "train.log_every_steps=1")
# Ten samples too many for the model's 165 parameters: it learns them by heart after two epochs.
OVERFIT = (
    *TOY,
    "optimizer=adam",
    "optimizer.lr=0.02",
    "dataset.num_samples=30",
    "batch.global_size=10",
    "train.epochs=4",
    "checkpoint.monitor=eval/loss",
    "checkpoint.mode=min",
)
STAY = ("optimizer.lr=1e-30", "train.max_steps=1", "train.num_threads=1")  # weights as they came
ROWS = {
    "steps": (
        *TOY,
        "train.max_steps=9",
        "checkpoint.every_steps=2",
        "checkpoint.every_epochs=null",
        "checkpoint.keep=2",
    ),
    "best": (*OVERFIT, "checkpoint.keep=1", "checkpoint.load_best=true"),
    "all": (
        *OVERFIT,
        "checkpoint.every_steps=1",
        "checkpoint.every_epochs=null",
        "checkpoint.keep=99",
    ),
    "regression": (*TOY, "checkpoint.monitor=eval/f1"),
    "best_by_f1": (),
    "checkpoint_demo": (),
}


STARTS = {
    "run": ("model=toy", "model.weights=sweep/experiment=best", *STAY),
    "checkpoint": (
        "model=toy",
        "model.weights=sweep/experiment=best/checkpoints/step-00000012",
        *STAY,
    ),
    "split": (
        "model=toy_mp",
        "parallelism=ddp_mp",
        "model.weights=sweep/experiment=best/model.safetensors",
        *STAY,
    ),
}


def run_sweep(folder: Path, rows: dict[str, tuple[str, ...]]) -> Ended:
    """Run each row as a job of one sweep; one without overrides is an experiment of conf/."""
    for name, overrides in rows.items():
        if overrides:
            write_experiment(folder / "conf", name, *overrides)
    return run_command(
        "-m",
        "--config-dir",
        "conf",
        f"experiment={','.join(rows)}",
        "hydra.sweep.dir=sweep",
        folder=folder,
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Runs that keep checkpoints in one way or another."""
    return run_sweep(tmp_path_factory.mktemp("best"), ROWS)


@pytest.fixture(scope="module")
def starts(sweep: Ended) -> Ended:
    """Runs that start from what one of them left, once it is there."""
    return run_sweep(sweep.folder, STARTS)


def run_dir(sweep: Ended, name: str) -> Path:
    """Return the folder of a row."""
    return sweep.folder / "sweep" / f"experiment={name}"


def weights(folder: Path) -> dict[str, Any]:
    """Return what a run exported."""
    return load_file(folder / "model.safetensors")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare weights bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def at(folder: Path, step: int) -> dict[str, Any]:
    """Return the model of a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:08d}" / "state.pt"
    model: dict[str, Any] = torch.load(path, weights_only=True)["model"]
    return model


def evaluations(folder: Path) -> dict[int, float]:
    """Return the evaluation losses by step."""
    return {line["step"]: line["eval/loss"] for line in metrics(folder) if "eval/loss" in line}


def test_checkpoints_by_steps_keep_the_newest(sweep: Ended) -> None:
    """Every second step and the last are saved, the newest two stay; the last is exported."""
    folder = run_dir(sweep, "steps")
    assert steps(folder) == [8, 9]
    assert same(weights(folder), at(folder, 9))


def test_the_best_checkpoint_stays_and_is_loaded_at_the_end(sweep: Ended) -> None:
    """By the least loss, which is not the last; evaluated once more and exported."""
    folder = run_dir(sweep, "best")
    losses = evaluations(folder)
    best = min(losses, key=lambda step: losses[step])
    assert best < max(losses) == 12
    assert steps(folder) == [best, 12]
    last = metrics(folder)[-1]
    assert (last["step"], last["best/loss"]) == (12, losses[best])
    assert record(folder)["metrics"]["best/loss"] == losses[best]
    told = f"best by eval/loss: {losses[best]:.4f} at step {best}, in model.safetensors"
    assert told in sweep.stdout
    assert same(weights(folder), at(folder, best))
    with safe_open(folder / "model.safetensors", "pt") as file:
        told = file.metadata()
    assert (told["step"], float(told["eval/loss"])) == (str(best), losses[best])


def test_a_checkpoint_holds_the_figures_of_its_own_step(sweep: Ended) -> None:
    """None between two evaluations passes for the best by an older state's loss."""
    folder = run_dir(sweep, "all")
    saved = {
        step: read_manifest(folder / "checkpoints" / f"step-{step:08d}").metrics
        for step in steps(folder)
    }
    assert list(saved) == list(range(1, 13))
    found = {step: one["eval/loss"] for step, one in saved.items() if "eval/loss" in one}
    assert found == evaluations(folder)
    assert list(found) == [3, 6, 9, 12]
    losses = {line["step"]: line["train/loss"] for line in metrics(folder) if "train/loss" in line}
    assert {step: one["train/loss"] for step, one in saved.items()} == losses
    assert same(weights(folder), at(folder, min(found, key=lambda step: found[step] or 0.0)))


def test_a_run_starts_from_what_another_left(starts: Ended) -> None:
    """From a run its best checkpoint counts; a split model takes a whole one's weights."""
    assert (starts.exit_code, starts.stderr) == (0, "")
    best = run_dir(starts, "best")
    assert same(weights(run_dir(starts, "run")), weights(best))
    assert same(weights(run_dir(starts, "checkpoint")), at(best, 12))
    assert same(weights(run_dir(starts, "split")), weights(best))
    assert not same(at(best, 12), weights(best))


def test_the_demo_saves_each_fourth_step(sweep: Ended) -> None:
    """As its YAML says, and keeps three."""
    assert steps(run_dir(sweep, "checkpoint_demo")) == [12, 16, 20]


def test_a_resumed_run_does_not_read_its_weights_again(starts: Ended) -> None:
    """They are gone, and the run goes on."""
    (run_dir(starts, "best") / "model.safetensors").rename(starts.folder / "elsewhere")
    folder = run_dir(starts, "split")
    try:
        end = run_command(f"resume='{folder}'", "train.max_steps=3", folder=starts.folder)
    finally:
        (starts.folder / "elsewhere").rename(run_dir(starts, "best") / "model.safetensors")
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(folder)["step"] == 3


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(sweep: Ended) -> None:
    """It says that nothing is left to resume from, and what the run has logged stays."""
    folder = sweep.folder / "damaged"
    shutil.copytree(run_dir(sweep, "steps"), folder)
    for state in folder.glob("checkpoints/*/state.pt"):
        os.truncate(state, 100)
    end = run_command(f"resume={folder}", "train.max_steps=12", folder=sweep.folder)
    assert end.exit_code == 2
    assert end.stderr.startswith("error: nothing is left to resume from: every checkpoint in ")
    assert len(end.stderr.splitlines()) == 1
    assert record(folder) == record(run_dir(sweep, "steps"))  # what it was, it still is
    assert metrics(folder) == metrics(run_dir(sweep, "steps"))
    assert steps(folder) == [8, 9]


def test_a_metric_that_the_dataset_will_not_have_is_refused_at_once(sweep: Ended) -> None:
    """Before the first step, not after the last."""
    assert sweep.exit_code == 2
    fields = record(run_dir(sweep, "regression"))
    assert fields["error"]["sentence"].startswith(
        "checkpoint.monitor=eval/f1 needs classes and dataset=random has none"
    )
    assert [line.split()[1] for line in sweep.stdout.splitlines() if line.startswith("experiment=")]


def test_the_experiment_by_f1_keeps_three_and_loads_the_best(sweep: Ended) -> None:
    """Its own numbers say which; every metric that may be monitored is in a checkpoint."""
    folder = run_dir(sweep, "best_by_f1")
    scores = {line["step"]: line["eval/f1"] for line in metrics(folder) if "eval/f1" in line}
    best = max(scores, key=lambda step: scores[step])
    assert scores[best] >= 0.95
    assert set(steps(folder)) == {*sorted(scores)[-3:], best}
    assert record(folder)["metrics"]["best/f1"] == scores[best]
    newest = folder / "checkpoints" / f"step-{max(scores):08d}"
    assert set(MONITORS) <= set(read_manifest(newest).metrics)
