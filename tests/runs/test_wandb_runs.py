"""Runs in W&B's offline folder, which is read back: a run, its resume, and a loop of one's own."""

import json
import os
from pathlib import Path

import psutil
import pytest
import wandb_folders
from commands import CommandResult, run_command
from own_loops import run_function
from run_folders import scalars

pytestmark = pytest.mark.full

TOY = (
    "model=toy",
    "dataset.num_samples=64",
    "batch.global_size=8",
    "train.epochs=2",
    "train.num_threads=1",
    "train.log_every_steps=4",
    "world_size=2",
    "hydra.run.dir=run",
)
WANDB = (
    "trackers=[wandb]",
    "trackers.wandb.mode=offline",
    "trackers.wandb.project=tests",
    "trackers.wandb.wait_s=120",
    "trackers.wandb.timeout_s=60.0",
)
DRAWN = ("drawn", "drawn/again")
LOOP = """
    import torch

    def train(run):
        step = run.restore()
        while step < 5:
            step += 1
            run.log({"mine/square": step * step}, step=step)
            run.log_image("drawn", torch.zeros(8, 8), step=step)
            run.log_image("drawn/again", torch.zeros(8, 8), step=step)
            if run.should_stop(step):
                return
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what W&B's client writes below the home folder out of it."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))


def offline_folders(result: CommandResult) -> list[Path]:
    """Return the folders of W&B, the earliest first; no process of its client is left."""
    for process in psutil.process_iter(["name", "cwd"]):
        left = process.info["name"] in ("wandb-core", "gpu_stats")
        assert not (left and process.info["cwd"] == os.fspath(result.folder)), process
    return sorted((result.folder / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_a_run_and_its_resume_are_in_one_run_of_wandb(tmp_path: Path) -> None:
    """Config, tags, notes, history and files; the resumed part has only the new steps."""
    first = run_command(*TOY, *WANDB, "tags=[baseline]", "notes='why I ran it'", folder=tmp_path)
    assert (first.exit_code, first.stderr) == (0, "")
    run_dir = tmp_path / "run"
    assert "warning" not in first.stdout
    (folder,) = offline_folders(first)
    before = scalars(run_dir)
    assert wandb_folders.scalars(folder) == pytest.approx(before)
    (shown,) = (one.run for one in wandb_folders.records(folder) if one.HasField("run"))
    config = {one.key: json.loads(one.value_json) for one in shown.config.update}
    assert (shown.display_name, shown.project) == (f"{tmp_path.name}/run", "tests")
    assert (list(shown.tags), shown.notes) == (["baseline"], "why I ran it")
    assert config["dataset"]["num_samples"] == 64
    (artifact,) = (
        one.artifact for one in wandb_folders.records(folder) if one.HasField("artifact")
    )
    files = {one.path for one in artifact.manifest.contents}
    assert files == {"run.json", "config.yaml", "model.safetensors"}

    again = run_command("resume=run", *WANDB, "train.epochs=3", "tags=[longer]", folder=tmp_path)
    assert (again.exit_code, again.stderr) == (0, "")
    _, folder = offline_folders(again)
    assert folder.name.endswith(shown.run_id)
    new = {key: value for key, value in scalars(run_dir).items() if key not in before}
    assert {step for step, _ in new} == {20, 24}
    assert wandb_folders.scalars(folder) == pytest.approx(new)
    (resumed,) = (one.run for one in wandb_folders.records(folder) if one.HasField("run"))
    assert (list(resumed.tags), resumed.notes) == (["longer"], "why I ran it")


def test_a_loop_of_ones_own_is_tracked_too(tmp_path: Path) -> None:
    """Its metrics by their own names, and its pictures."""
    result = run_function(LOOP, *WANDB, "hydra.run.dir=run", folder=tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    (folder,) = offline_folders(result)
    squares = {(step, "mine/square"): step**2 for step in range(1, 6)}
    assert wandb_folders.scalars(folder).items() >= squares.items()
    (artifact,) = (
        one.artifact for one in wandb_folders.records(folder) if one.HasField("artifact")
    )
    files = {one.path for one in artifact.manifest.contents}
    pictures = {f"images/{name}/step-0000000{step}.png" for name in DRAWN for step in range(1, 6)}
    assert files == {"run.json", "config.yaml", *pictures}
