"""The page about a loop of your own: its files run by its commands, and its table is complete."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from commands import run_command
from pages import ROOT, commands, write_files
from run_folders import metrics, record
from safetensors.torch import load_file
from tiers import first_of

from ddp_runner import Run

pytestmark = pytest.mark.full

PAGE = "docs/your_own_loop.md"
COMMANDS = commands(PAGE)


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_each_command_of_the_page_runs(number: int, tmp_path: Path) -> None:
    """With the page's own files, or with the example of this project."""
    write_files(PAGE, tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = COMMANDS[number]
    is_example = "examples/gan/conf" in command
    fewer = ["loop.epochs=1"] if is_example else []
    ranks = [] if "-m" in command else ["world_size=2"]
    done = run_command(
        *command, *ranks, *fewer, folder=tmp_path, environ={"PYTHONPATH": str(tmp_path)}
    )
    assert done.exit_code == 0, done.stderr
    for run in done.run_dirs:
        assert record(run)["status"] == "completed"
        lines = metrics(run)
        assert (run / "model.safetensors").exists()
        if "task=my_package.lbfgs.train" in command:
            continue
        assert any("g/loss" in line or "generator/loss" in line for line in lines)
        assert list((run / "images" / "samples").iterdir())


@pytest.mark.parametrize("num_samples", first_of([401, 400], num_full=0))
def test_lbfgs_on_two_ranks_is_that_of_one_process(num_samples: int, tmp_path: Path) -> None:
    """Its line search takes the same decisions: the loss and the weights differ by rounding."""
    write_files(PAGE, tmp_path)
    (command,) = [one for one in COMMANDS if "task=my_package.lbfgs.train" in one]
    found = []
    for size in (1, 2):
        words = (
            f"world_size={size}",
            f"dataset.num_samples={num_samples}",
            f"hydra.run.dir={size}",
        )
        environ = {"PYTHONPATH": str(tmp_path)}
        done = run_command(*command, *words, folder=tmp_path, environ=environ)
        assert done.exit_code == 0, done.stderr
        weights = load_file(tmp_path / str(size) / "model.safetensors")
        losses = [line["train/loss"] for line in metrics(tmp_path / str(size))]
        found.append((losses, torch.cat([one.flatten() for one in weights.values()])))
    (one, whole), (other, shared) = found
    assert one[-1] < 0.9 * one[0]
    assert other == pytest.approx(one, rel=1e-6)
    assert torch.allclose(whole, shared, rtol=1e-4, atol=1e-4)  # sixty evaluations amplify it


def test_the_table_has_all_that_a_run_offers() -> None:
    """And nothing that it does not."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `run.")]
    named = {name for row in rows for name in re.findall(r"`(?:run)?\.(\w+)", row)}
    methods = {name for name, _ in inspect.getmembers(Run, inspect.isfunction)}
    facts = {"rank", "world_size", "is_rank_zero", "device", "devices", "config", "seed", "run_dir"}
    assert named == {name for name in methods if not name.startswith("_")} | facts
