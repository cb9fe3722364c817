"""ddp_runner.load and read_runs, as a notebook uses them."""

import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from rights import unreadable
from run_folders import record
from train_states import compose_config

import ddp_runner
from ddp_runner.checkpoint.model_file import export_weights
from ddp_runner.checkpoint.weights import starting_weights
from ddp_runner.errors import UserError
from ddp_runner.files import file_sha256
from ddp_runner.tracking.run_record import write_run_record

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


@pytest.mark.full
def test_a_cell_of_a_notebook(sweep: Path) -> None:
    """A fresh interpreter, as a kernel is, outside of the folder of the runs."""
    code = CELL.format(run=sweep / "optimizer.lr=0.01", sweep=sweep)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=sweep.parent
    )
    assert found.stdout.splitlines() == ["ToyModel False", "(2,) ['completed', 'completed']"]


def test_loading_leaves_random_numbers_and_process_group_alone(sweep: Path) -> None:
    """A notebook goes on as if nothing had happened."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    ddp_runner.load(sweep / "optimizer.lr=0.01", weights="last")
    assert torch.get_rng_state().equal(before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert not torch.distributed.is_initialized()


def test_weights_are_those_that_are_asked_for(sweep: Path) -> None:
    """The export holds the averaged weights, and so does what a checkpoint gives."""
    run_dir = sweep / "optimizer.lr=0.01"
    best, last = (ddp_runner.load(run_dir, weights=one).state_dict() for one in ("best", "last"))
    assert all(best[name].equal(last[name]) for name in best)
    checkpoint = next(iter(sorted((run_dir / "checkpoints").glob("step-*"))))
    trained = torch.load(checkpoint / "state.pt", weights_only=True)["objects"]["model"]
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


@pytest.mark.full
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
        assert row["reason"] is None or math.isnan(row["reason"])


@pytest.mark.full
def test_read_runs_keeps_a_failed_run_with_its_reason(sweep: Path, tmp_path: Path) -> None:
    """A run that cannot be compared is a row as well."""
    args = ("model=toy", *SHORT, "optimizer.lr=1e30", "hydra.run.dir=failed")
    assert run_command(*args, folder=tmp_path).exit_code == 2
    found = ddp_runner.read_runs([sweep, tmp_path / "failed"])
    reasons = found["reason"].dropna()
    assert len(found) == 3
    assert len(reasons) == 1
    assert "failed" in reasons.iloc[0]


def test_importing_the_package_is_cheap() -> None:
    """The launcher imports it before anything else: no torch, pandas or Hydra."""
    code = "import sys, ddp_runner; print({'torch', 'pandas', 'hydra', 'yaml'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("weights", ["bset", "600", -1, True, None, 1.0])
def test_weights_that_nothing_is_called_are_named(weights: Any, sweep: Path) -> None:
    """Not taken for the newest checkpoint."""
    with pytest.raises(UserError, match="must be best, last, or the step"):
        ddp_runner.load(sweep / "optimizer.lr=0.01", weights=weights)


@pytest.fixture
def copy(sweep: Path, tmp_path: Path) -> Path:
    """Return a run to damage."""
    return Path(shutil.copytree(sweep / "optimizer.lr=0.01", tmp_path / "copy"))


def test_a_flipped_bit_of_an_export_is_named(copy: Path) -> None:
    """run.json has its checksum."""
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged: its checksum differs"):
        ddp_runner.load(copy)
    ddp_runner.load(copy, weights="last")
    config = compose_config(f"model.weights={copy}")
    with pytest.raises(UserError, match=r"damaged: .* or write model.weights=.*/step-XXXXXXXX"):
        starting_weights(config, copy / "none", log=print)


def test_an_export_that_cannot_be_read_is_named(copy: Path) -> None:
    """With what can be loaded in its place."""
    path = copy / "model.safetensors"
    with unreadable(path), pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        ddp_runner.load(copy)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"Is a directory\).* write inference.weights=last"):
        ddp_runner.load(copy)
    ddp_runner.load(copy, weights="last")


def test_a_kill_between_the_export_and_its_checksum_damages_nothing(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has not completed, so its checkpoints are taken; run.json is of an earlier export."""
    best = ddp_runner.load(copy).state_dict()
    write_run_record(copy, status="failed", export_sha256="0" * 64)
    found = ddp_runner.load(copy).state_dict()
    assert all(found[name].equal(best[name]) for name in best)
    assert "model.safetensors is skipped: the run has not completed" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["", ".hydra", ".hydra/config.yaml"])
def test_a_run_that_is_somebody_elses_is_named(copy: Path, place: str) -> None:
    """Whether the folder is private or a file in it."""
    with unreadable(copy / place), pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        ddp_runner.load(copy)


def test_a_path_that_cannot_be_one_is_named() -> None:
    """In one line, as everything that a user can cause."""
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)"):
        ddp_runner.load("x" * 300)


def test_an_export_that_the_run_has_trained_beyond_is_not_its_best(copy: Path) -> None:
    """A run that was resumed and stopped has newer weights, and no newer export."""
    old = ddp_runner.load(copy).state_dict()
    args = (f"resume={str(copy).replace('=', chr(92) + '=')}", "train.max_steps=8")
    assert run_command(*args, folder=copy.parent).exit_code == 0
    new = ddp_runner.load(copy).state_dict()
    assert any(not old[name].equal(new[name]) for name in old)
    export = copy / "model.safetensors"
    write_run_record(copy, status="preempted")
    export.unlink()
    export_weights(export, old, old.values(), step=4, metrics={}, is_average=True)
    write_run_record(copy, export_sha256=file_sha256(export))
    found = ddp_runner.load(copy).state_dict()
    assert all(found[name].equal(new[name]) for name in new)


def test_a_secret_that_the_model_does_not_need_may_be_missing(copy: Path) -> None:
    """A notebook need not have the environment of the training."""
    path = copy / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0\n", "seed: ${oc.env:NOT_SET_ANYWHERE}\n", 1))
    with pytest.raises(UserError, match="NOT_SET_ANYWHERE"):
        ddp_runner.load(copy)
    text = path.read_text().replace("${oc.env:NOT_SET_ANYWHERE}", "0")
    path.write_text(text.replace("  input_size: 10", "  input_size: ${oc.env:NOT_SET_ANYWHERE}"))
    ddp_runner.load(copy)


def test_a_run_that_goes_on_is_read_as_far_as_it_is(copy: Path) -> None:
    """Its config, while it trains."""
    write_run_record(copy, status="running")
    (row,) = ddp_runner.read_runs(copy).to_dict("records")
    assert row["optimizer.lr"] == 0.01
    assert row["status"] == "lost"
    assert "lost; last sign of life" in row["reason"]
