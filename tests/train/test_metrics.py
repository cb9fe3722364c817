"""What a log line costs, and that each sample counts once in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiers import first_of
from train_states import build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.device import values_of
from ddp_runner.dist_env import DistEnv

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
)


def counted_collectives(env: DistEnv, log_every_steps: int) -> int:
    """Return how many collectives our own code calls in twelve steps, with their log lines."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **options)

        return call

    config = compose_config(
        *("model=toy", "dataset.num_samples=96", "batch.global_size=8", "train.epochs=1"),
        *(f"train.log_every_steps={log_every_steps}", "train.eval_every_epochs=0"),
        world_size=env.world_size,
    )
    state = build(env, config)
    for name in COLLECTIVES:
        setattr(dist, name, counted(getattr(dist, name)))
    run_loop(env, config, max_steps=12, state=state)
    return calls


@pytest.mark.parametrize("world_size", first_of([2, 8], num_full=0))
def test_a_log_line_takes_one_collective_on_any_number_of_ranks(world_size: int) -> None:
    """Twelve lines need ten collectives more than two lines, whatever the number of ranks."""
    often, seldom = (run_ranks(counted_collectives, world_size, every) for every in (1, 6))
    assert set(often) == {often[0]}
    assert often[0] - seldom[0] == 10


def logged_losses(env: DistEnv, config: Config) -> list[float]:
    """Run the loop; return the loss of each line."""
    return run_loop(env, config, max_steps=3).losses


@pytest.mark.full
@pytest.mark.parametrize(("num_replicas", "mode"), first_of([(1, "tp"), (2, "fsdp_tp")]))
def test_ranks_that_compute_one_share_together_count_once(
    num_replicas: int, mode: str, tmp_path: Path
) -> None:
    """Two ranks that split the layers have the same loss; a sum over all ranks would double it."""
    (tmp_path / "letters.txt").write_text("".join(chr(97 + one * one % 26) for one in range(241)))
    keys = (
        *("model=gpt", f"dataset.path={tmp_path / 'letters.txt'}", "dataset.sequence_length=8"),
        *("model.num_layers=1", "model.width=16", "model.num_heads=2", "batch.global_size=8"),
        *("train.log_every_steps=1", "train.eval_every_epochs=0"),
    )
    (expected,) = run_ranks(logged_losses, 1, compose_config(*keys, "parallelism=single"))
    world_size = 2 * num_replicas
    config = compose_config(*keys, f"parallelism={mode}", world_size=world_size)
    for found in run_ranks(logged_losses, world_size, config):
        assert found == pytest.approx(expected, rel=1e-4)


def test_values_of_scalars_are_read_whatever_their_shape() -> None:
    """A step may return sums of one element; without any there is nothing to wait for."""
    scalars = [torch.ones(()), torch.full((1,), 2.5), torch.tensor(True)]
    assert values_of(scalars) == [1.0, 2.5, 1.0]
    assert values_of([]) == []
