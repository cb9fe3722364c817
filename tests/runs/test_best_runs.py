"""Which checkpoints a real run keeps, which is the best, and which weights it exports."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandResult, error_line, run_command
from configs import write_experiment
from run_folders import checkpoint_dir, checkpoint_steps, metrics, record
from safetensors import safe_open
from safetensors.torch import load_file
from tiers import runs_full

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.metric_names import MONITORS
from ddp_runner.sweep.sweep_dir import read_plan
from ddp_runner.sweep.sweep_table import read_objective

TOY = ("model=toy", "train.num_threads=1", "train.log_every_steps=1")
# Few samples for the model's 165 parameters: it overfits after two epochs.
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
STAY = ("optimizer.lr=1e-30", "train.max_steps=1", "train.num_threads=1")  # keeps the weights
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


def run_sweep(folder: Path, rows: dict[str, tuple[str, ...]]) -> CommandResult:
    """Run each row as a job of one sweep; a row without overrides is an experiment of conf/."""
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
def sweep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CommandResult:
    """Runs with different settings for checkpoints."""
    rows = ROWS if runs_full(request) else {name: ROWS[name] for name in ("best", "steps")}
    return run_sweep(tmp_path_factory.mktemp("best"), rows)


@pytest.fixture(scope="module")
def starts(sweep: CommandResult) -> CommandResult:
    """Runs that start from the weights of a run in `sweep`."""
    return run_sweep(sweep.folder, STARTS)


def run_dir(sweep: CommandResult, name: str) -> Path:
    """Return the folder of a row."""
    return sweep.folder / "sweep" / f"experiment={name}"


def weights(folder: Path) -> dict[str, Any]:
    """Return the weights that a run exported."""
    return load_file(folder / "model.safetensors")


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare weights bit for bit."""
    return state.keys() == other.keys() and all(state[key].equal(other[key]) for key in state)


def saved_weights(folder: Path, step: int) -> dict[str, Any]:
    """Return the weights in a checkpoint."""
    path = checkpoint_dir(folder, step) / "state.pt"
    model: dict[str, Any] = torch.load(path, weights_only=True)["objects"]["model"]
    return model


def evaluations(folder: Path) -> dict[int, float]:
    """Return the evaluation losses by step."""
    return {line["step"]: line["eval/loss"] for line in metrics(folder) if "eval/loss" in line}


@pytest.mark.slow
@pytest.mark.full
def test_checkpoints_by_steps_keep_the_newest(sweep: CommandResult) -> None:
    """Every second step and the last are saved, the newest two are kept, the last is exported."""
    folder = run_dir(sweep, "steps")
    assert checkpoint_steps(folder) == [8, 9]
    assert same(weights(folder), saved_weights(folder, 9))


@pytest.mark.full
def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(sweep: CommandResult) -> None:
    """It has the lowest loss, which is not the last; it is evaluated again and exported."""
    folder = run_dir(sweep, "best")
    losses = evaluations(folder)
    best = min(losses, key=lambda step: losses[step])
    assert best < max(losses) == 12
    assert checkpoint_steps(folder) == [best, 12]
    last = metrics(folder)[-1]
    assert (last["step"], last["best/loss"]) == (12, losses[best])
    assert record(folder)["metrics"]["best/loss"] == losses[best]
    result = f"best by eval/loss: {losses[best]:.4f} at step {best}, in model.safetensors"
    assert result in sweep.stdout
    assert same(weights(folder), saved_weights(folder, best))
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["step"], float(metadata["eval/loss"])) == (str(best), losses[best])


@pytest.mark.full
def test_what_is_exported_is_what_is_shown_and_ranked(sweep: CommandResult) -> None:
    """In run.json, in the sweep's table, as its objective, and in a comparison."""
    folder = run_dir(sweep, "best")
    losses, fields = evaluations(folder), record(folder)
    best = min(losses, key=lambda step: losses[step])
    assert (fields["exported_step"], fields["metrics"]["eval/loss"]) == (best, losses[best])
    (row,) = [line for line in sweep.stdout.splitlines() if line.startswith(f"{folder.name}  ")]
    assert f"eval/loss {losses[best]:.4f}" in row
    assert f"(best, step {best})" in row
    jobs = read_plan(folder.parent).jobs.values()
    (job,) = [one for one in jobs if one.folder == folder.name]
    found = job.standing(folder.parent)
    assert read_objective(folder, found, name="eval/loss") == losses[best]
    (run,) = read_runs([folder])
    assert run.result("eval/loss") == losses[best]
    assert any("from its best step" in note for note in run.notes)
    assert record(run_dir(sweep, "steps"))["exported_step"] == 9


@pytest.mark.full
def test_a_checkpoint_has_the_metrics_of_its_own_step(sweep: CommandResult) -> None:
    """So a checkpoint between two evaluations cannot count as the best."""
    folder = run_dir(sweep, "all")
    saved = {
        step: read_manifest(checkpoint_dir(folder, step)).metrics
        for step in checkpoint_steps(folder)
    }
    assert list(saved) == list(range(1, 13))
    evaluated = {step: part["eval/loss"] for step, part in saved.items() if "eval/loss" in part}
    assert evaluated == evaluations(folder)
    assert list(evaluated) == [3, 6, 9, 12]
    losses = {line["step"]: line["train/loss"] for line in metrics(folder) if "train/loss" in line}
    assert {step: part["train/loss"] for step, part in saved.items()} == losses
    best = min(evaluated, key=lambda step: evaluated[step] or 0.0)
    assert same(weights(folder), saved_weights(folder, best))


@pytest.mark.full
def test_a_run_starts_from_what_another_left(starts: CommandResult) -> None:
    """A run gives its best checkpoint; a split model takes the weights of a whole model."""
    assert (starts.exit_code, starts.stderr) == (0, "")
    best = run_dir(starts, "best")
    assert same(weights(run_dir(starts, "run")), weights(best))
    assert same(weights(run_dir(starts, "checkpoint")), saved_weights(best, 12))
    assert same(weights(run_dir(starts, "split")), weights(best))
    assert not same(saved_weights(best, 12), weights(best))


@pytest.mark.full
def test_the_demo_saves_every_fourth_step(sweep: CommandResult) -> None:
    """It keeps three checkpoints, as its YAML says."""
    folder = run_dir(sweep, "checkpoint_demo")
    assert checkpoint_steps(folder) == [12, 16, 20]
    fields = record(folder)
    assert (fields["status"], fields["parallelism"], fields["world_size"]) == (
        "completed",
        "ddp",
        2,
    )


@pytest.mark.full
def test_a_resumed_run_does_not_read_its_weights_again(starts: CommandResult) -> None:
    """It continues although they are gone."""
    (run_dir(starts, "best") / "model.safetensors").rename(starts.folder / "elsewhere")
    folder = run_dir(starts, "split")
    try:
        end = run_command(f"resume='{folder}'", "train.max_steps=3", folder=starts.folder)
    finally:
        (starts.folder / "elsewhere").rename(run_dir(starts, "best") / "model.safetensors")
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(folder)["step"] == 3


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(sweep: CommandResult) -> None:
    """The error says that nothing is left to resume from; the run's files stay as they were."""
    folder = sweep.folder / "damaged"
    shutil.copytree(run_dir(sweep, "steps"), folder)
    for state in folder.glob("checkpoints/*/state.pt"):
        os.truncate(state, 100)
    end = run_command(f"resume={folder}", "train.max_steps=12", folder=sweep.folder)
    sentence = "nothing is left to resume from: every checkpoint in "
    assert error_line(end).startswith(sentence)
    assert record(folder) == record(run_dir(sweep, "steps"))
    assert metrics(folder) == metrics(run_dir(sweep, "steps"))
    assert checkpoint_steps(folder) == [8, 9]


@pytest.mark.full
def test_monitoring_a_metric_without_classes_is_an_error_at_once(sweep: CommandResult) -> None:
    """The job ends before its first step."""
    assert sweep.exit_code == 2
    fields = record(run_dir(sweep, "regression"))
    assert fields["error"]["sentence"].startswith(
        "checkpoint.monitor (eval/f1) must be one of eval/loss"
    )
    assert [line.split()[1] for line in sweep.stdout.splitlines() if line.startswith("experiment=")]


@pytest.mark.full
def test_the_experiment_by_f1_keeps_three_and_loads_the_best(sweep: CommandResult) -> None:
    """Its metrics say which is the best; a checkpoint has every metric that can be monitored."""
    folder = run_dir(sweep, "best_by_f1")
    scores = {line["step"]: line["eval/f1"] for line in metrics(folder) if "eval/f1" in line}
    best = max(scores, key=lambda step: scores[step])
    fields = record(folder)
    assert (fields["status"], fields["parallelism"], fields["world_size"]) == (
        "completed",
        "ddp",
        2,
    )
    assert scores[best] >= 0.95
    assert set(checkpoint_steps(folder)) == {*sorted(scores)[-3:], best}
    assert fields["metrics"]["best/f1"] == scores[best]
    newest = checkpoint_dir(folder, max(scores))
    assert set(MONITORS) <= set(read_manifest(newest).metrics)
