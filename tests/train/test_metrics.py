"""What a log line costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from train_states import build, compose_config, run_loop

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


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_log_line_takes_one_collective_on_any_number_of_ranks(world_size: int) -> None:
    """Twelve lines need ten collectives more than two lines, whatever the number of ranks."""
    often, seldom = (run_ranks(counted_collectives, world_size, every) for every in (1, 6))
    assert set(often) == {often[0]}
    assert often[0] - seldom[0] == 10
