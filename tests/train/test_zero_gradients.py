"""A first batch whose gradients are all zero is one warning, in every mode of parallelism."""

from pathlib import Path

import pytest
from commands import run_command
from modes import MODES, is_cut, smallest_world
from run_folders import record
from tiers import named

WORDS = "all gradients of the first batch are exactly 0 (loss"


@pytest.mark.parametrize("mode", named(MODES, quick=["ddp", "fsdp"]))
def test_gradients_that_are_all_zero_are_one_warning(mode: str, tmp_path: Path) -> None:
    """Over all ranks and shards, though the loss is not zero; without such a loss there is none."""
    keys = (
        f"model={'toy_mp' if is_cut(mode) else 'toy'}",
        f"parallelism={mode}",
        f"world_size={smallest_world(mode)}",
        "train.max_steps=2",
        "allowed_targets=[broken_models]",
    )
    environ = {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    for loss, expected in (("broken_models.blind", 1), ("ddp_runner.train.losses.mse", 0)):
        end = run_command(*keys, f"model.loss={loss}", folder=tmp_path / loss, environ=environ)
        assert end.exit_code == 0, end.stderr
        warnings = [one for one in record(end.run_dir)["warnings"] if WORDS in one]
        assert len(warnings) == end.stdout.count(f"warning: {WORDS}") == expected
