"""A first batch whose gradients are all zero is one warning, in every mode of parallelism."""

from pathlib import Path
from unittest.mock import patch

import pytest
from commands import run_command
from modes import OF_ANY_MODEL, has_stages, smallest_world
from ranks import run_ranks
from run_folders import record
from tiers import first_of, named
from train_states import Trace, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv

WORDS = "all gradients of the first batch are exactly 0 (loss"
LOSSES = {"broken_models.blind": False, "ddp_runner.train.losses.mse": True}  # whether one teaches


def keys_of(mode: str) -> tuple[str, ...]:
    """Return the command line of two steps under a mode."""
    return (
        f"model={'toy_mp' if has_stages(mode) else 'toy'}",
        f"parallelism={mode}",
        "train.max_steps=2",
        "allowed_targets=[broken_models]",
    )


@pytest.mark.parametrize("mode", first_of(["ddp", "fsdp"], num_quick=0, num_full=1))
def test_gradients_that_are_all_zero_are_one_warning(mode: str, tmp_path: Path) -> None:
    """Over all ranks and shards, though the loss is not zero; without such a loss there is none."""
    keys = (*keys_of(mode), f"world_size={smallest_world(mode)}")
    environ = {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    for loss, teaches in LOSSES.items():
        end = run_command(*keys, f"model.loss={loss}", folder=tmp_path / loss, environ=environ)
        assert end.exit_code == 0, end.stderr
        warnings = [one for one in record(end.run_dir)["warnings"] if WORDS in one]
        assert len(warnings) == end.stdout.count(f"warning: {WORDS}") == 1 - teaches


def taught(env: DistEnv, configs: list[Config]) -> list[list[bool]]:
    """Train with each config; return what the logger that warns is told of the first batch."""
    found = []
    for config in configs:
        with patch.object(Trace, "first_loss") as first_loss:
            assert not run_loop(env, config, max_steps=2).error
        found.append([call.kwargs["has_gradient"] for call in first_loss.call_args_list])
    return found


@pytest.mark.parametrize("mode", named(OF_ANY_MODEL, quick=("ddp",)))
def test_every_mode_finds_gradients_that_are_all_zero(mode: str) -> None:
    """Rank 0, which logs, is told once."""
    size = smallest_world(mode)
    configs = [
        compose_config(*keys_of(mode), f"model.loss={loss}", world_size=size) for loss in LOSSES
    ]
    first, *_ = run_ranks(taught, size, configs)
    assert first == [[teaches] for teaches in LOSSES.values()]
