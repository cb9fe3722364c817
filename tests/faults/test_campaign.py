"""A few kills of the campaign in benchmarks/, and the differences that it must notice."""

import shutil
import sys
from pathlib import Path

import pytest
from injection import flip_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from undisturbed import WrongError, assert_equal, assert_whole

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.store import load_checkpoint, save_checkpoint
from ddp_runner.config.training import CheckpointConfig

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "benchmarks")
)  # after the helpers, of which one has the same name
from kill_campaign import NUM_STEPS, campaign, uninterrupted

pytestmark = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "ps"])
def test_killed_runs_end_as_uninterrupted_runs(short_temp: Path, mode: str) -> None:
    """Every checkpoint loads, every resume is exact, and nothing is left."""
    result = campaign(short_temp, kills=1, seed=1, jobs=1, modes=(mode,), log=print)
    assert result.failures == []
    assert sum(result.kills.values()) >= 1


def change_weight(run: Path) -> None:
    """Change a weight of the last checkpoint, with correct checksums."""
    path = max((run / "checkpoints").iterdir())
    state, manifest = load_checkpoint(path), read_manifest(path)
    next(iter(state["objects"]["model"].values())).view(-1)[0] += 1e-6
    shutil.rmtree(path)
    facts = {"step": manifest.step, "metrics": manifest.metrics}
    save_checkpoint(path.parent, state, **facts, config=CheckpointConfig(keep=9), log=print)


def change_metrics(run: Path) -> None:
    """Change a step in metrics.jsonl."""
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8', 1))


def delete_checkpoint(run: Path) -> None:
    """Delete a checkpoint that retention keeps."""
    shutil.rmtree(min((run / "checkpoints").iterdir()))


def change_export(run: Path) -> None:
    """Change an exported weight."""
    path = run / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1e-6
    save_file(tensors, path, facts)


def test_the_campaign_notices_every_difference(tmp_path: Path) -> None:
    """A changed weight, number, checkpoint or byte fails; the unchanged run passes."""
    run = uninterrupted("single", tmp_path / "single").run_dir
    assert_equal(run, run, num_steps=NUM_STEPS)
    for change in (change_weight, change_metrics, delete_checkpoint, change_export):
        other = tmp_path / change.__name__
        shutil.copytree(run, other)
        change(other)
        with pytest.raises(WrongError):
            assert_equal(other, run, num_steps=NUM_STEPS)
    assert_whole(run)
    flip_bits(max((run / "checkpoints").iterdir()) / "state.pt", 1000)
    with pytest.raises(WrongError, match="does not load"):
        assert_whole(run)
