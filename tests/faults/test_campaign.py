"""A few kills of the campaign, and what it must not overlook; a thousand are in benchmarks/."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from injection import flip
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.store import load_checkpoint, save_checkpoint
from ddp_runner.config.schema import CheckpointConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kill_campaign import MODES, WrongError, assert_equal, assert_whole, campaign, uninterrupted


def test_killed_runs_end_as_the_undisturbed_ones() -> None:
    """In each mode: no state that does not load, no wrong resume, nothing left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        result = campaign(Path(base), kills=4, seed=1, jobs=1, modes=list(MODES), log=print)
    assert result.bad == []
    assert sum(result.kills.values()) >= 4


def one_weight(run: Path) -> None:
    """Let a weight of the last checkpoint be another one, with checksums that are right."""
    path = max((run / "checkpoints").iterdir())
    state, manifest = load_checkpoint(path), read_manifest(path)
    next(iter(state["model"].values())).view(-1)[0] += 1e-6
    shutil.rmtree(path)
    facts = {"step": manifest.step, "metrics": manifest.metrics}
    save_checkpoint(path.parent, state, **facts, config=CheckpointConfig(keep=9), log=print)


def one_figure(run: Path) -> None:
    """Let a line of metrics say something else."""
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8', 1))


def one_checkpoint(run: Path) -> None:
    """Lose a checkpoint that retention keeps."""
    shutil.rmtree(min((run / "checkpoints").iterdir()))


def the_export(run: Path) -> None:
    """Let an exported weight be another one."""
    path = run / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1e-6
    save_file(tensors, path, facts)


def test_the_campaign_sees_what_differs(tmp_path: Path) -> None:
    """One weight, figure, checkpoint or byte is enough; the run itself passes."""
    run = uninterrupted("single", tmp_path / "single").run_dir
    assert_equal(run, run)
    changes: list[Callable[[Path], None]] = [one_weight, one_figure, one_checkpoint, the_export]
    for change in changes:
        other = tmp_path / change.__name__
        shutil.copytree(run, other)
        change(other)
        with pytest.raises(WrongError):
            assert_equal(other, run)
    assert_whole(run)
    flip(max((run / "checkpoints").iterdir()) / "state.pt", 1000)
    with pytest.raises(WrongError, match="does not load"):
        assert_whole(run)
