"""ddp_runner.load, read_runs and read_metrics, as a notebook uses them."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import run_command
from run_folders import metrics, record

import ddp_runner
from ddp_runner.errors import UserError

SHORT = ("train.max_steps=4", "train.num_threads=1", "dataset.num_samples=64")
CELL = """
import ddp_runner

model = ddp_runner.load("{run}")
runs = ddp_runner.read_runs(["{sweep}"])
print(type(model).__name__, model.training)
print(runs.groupby("optimizer.lr")["eval/loss"].mean().shape, list(runs["status"]))
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep of two runs over the learning rate."""
    folder = tmp_path_factory.mktemp("sweep")
    args = ("-m", "model=toy", *SHORT, "optimizer.lr=0.01,0.02", "world_size=2", "ema.decay=0.5")
    end = run_command(*args, "hydra.sweep.dir=sweep", folder=folder)
    assert end.exit_code == 0, end.stderr
    return folder / "sweep"


def test_a_cell_of_a_notebook(sweep: Path) -> None:
    """A fresh interpreter, as a kernel is, outside of the folder of the runs."""
    code = CELL.format(run=sweep / "optimizer.lr=0.01", sweep=sweep)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=sweep.parent
    )
    assert found.stdout.splitlines() == ["ToyModel False", "(2,) ['completed', 'completed']"]


def test_loading_leaves_random_numbers_and_process_group_alone(sweep: Path) -> None:
    """A notebook goes on as if nothing had happened."""
    before = torch.get_rng_state()
    ddp_runner.load(sweep / "optimizer.lr=0.01", weights="last")
    assert torch.get_rng_state().equal(before)
    assert not torch.distributed.is_initialized()


def test_weights_are_those_that_are_asked_for(sweep: Path) -> None:
    """The export holds the averaged weights, and so does what a checkpoint gives."""
    run_dir = sweep / "optimizer.lr=0.01"
    best, last = (ddp_runner.load(run_dir, weights=one).state_dict() for one in ("best", "last"))
    assert all(best[name].equal(last[name]) for name in best)
    checkpoint = next(iter(sorted((run_dir / "checkpoints").glob("step-*"))))
    trained = torch.load(checkpoint / "state.pt", weights_only=True)["model"]
    assert any(not best[name].equal(trained[name]) for name in best)
    with pytest.raises(UserError, match="no checkpoint of that step"):
        ddp_runner.load(run_dir, weights=4711)


def test_a_run_names_nothing_that_the_notebook_does_not_allow(sweep: Path, tmp_path: Path) -> None:
    """A folder that somebody sent must not run code, and cannot allow itself to."""
    config = (sweep / "optimizer.lr=0.01" / ".hydra" / "config.yaml").read_text()
    hostile = re.sub(r"_target_: ddp_runner\.models\S+", "_target_: evil.Model", config)
    hostile = hostile.replace("allowed_targets: []", "allowed_targets: [evil]")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(hostile)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"evil.Model.*allowed_targets"):
        ddp_runner.load(tmp_path)


def test_what_is_no_run_of_a_training_is_named(sweep: Path, tmp_path: Path) -> None:
    """One sentence for a folder without a run, and for an evaluation."""
    with pytest.raises(UserError, match="is not a run folder"):
        ddp_runner.load(tmp_path)
    run = str(sweep / "optimizer.lr=0.01").replace("=", "\\=")
    args = ("task=evaluate", f"resume={run}", "hydra.run.dir=evaluation")
    assert run_command(*args, folder=tmp_path).exit_code == 0
    with pytest.raises(UserError, match="task=evaluate; give a run of task=train"):
        ddp_runner.load(tmp_path / "evaluation")


def test_read_runs_has_a_row_for_each_run_with_its_config_and_metrics(sweep: Path) -> None:
    """The columns are the keys and the metrics by their own names."""
    found = ddp_runner.read_runs(str(sweep))
    assert found.index.name == "run"
    assert sorted(found["optimizer.lr"]) == [0.01, 0.02]
    for folder, row in found.iterrows():
        left = record(Path(str(folder)))
        assert row["eval/loss"] == left["metrics"]["eval/loss"]
        assert (row["world_size"], row["status"]) == (2, "completed")
        assert pd.isna(row["reason"])


def test_read_runs_keeps_a_failed_run_with_its_reason(sweep: Path, tmp_path: Path) -> None:
    """A run that cannot be compared is a row as well."""
    args = ("model=toy", *SHORT, "optimizer.lr=1e30", "hydra.run.dir=failed")
    assert run_command(*args, folder=tmp_path).exit_code == 2
    found = ddp_runner.read_runs([sweep, tmp_path / "failed"])
    reasons = found["reason"].dropna()
    assert len(found) == 3
    assert len(reasons) == 1
    assert "failed" in reasons.iloc[0]


def test_read_metrics_has_every_line(sweep: Path) -> None:
    """Lines of metrics.jsonl, with the run in front."""
    found = ddp_runner.read_metrics(sweep)
    for folder, rows in found.groupby("run"):
        lines = metrics(Path(str(folder)))
        assert list(rows["step"]) == [line["step"] for line in lines]
        losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
        assert list(rows["eval/loss"].dropna()) == losses


def test_importing_the_package_is_cheap() -> None:
    """The launcher imports it before anything else: no torch, pandas or Hydra."""
    code = "import sys, ddp_runner; print({'torch', 'pandas', 'hydra', 'yaml'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
