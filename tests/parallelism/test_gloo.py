"""What the split modes send over gloo: no block more often than it must be, and no part twice."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from orders import steps_of
from ranks import run_ranks
from tiers import first_of
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode
from train_states import build, compose_config

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mesh import GlooReduceScatter

NUM_BLOCKS = 3
GPT = (
    *("model=gpt", f"model.num_layers={NUM_BLOCKS}", "model.width=16", "model.num_heads=2"),
    *("batch.global_size=8", "dataset.sequence_length=16", "dataset.eval_fraction=0.0005"),
)
KINDS = list(product((torch.float32, torch.float64, torch.bfloat16), (ReduceOp.SUM, ReduceOp.AVG)))


def both(env: DistEnv) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each kind this rank's part by our reduce-scatter and by torch's."""
    assert dist.group.WORLD is not None
    found = []
    for dtype, op in KINDS:
        values = torch.arange(12, dtype=dtype).mul_(env.rank + 1)
        ours = GlooReduceScatter().allocate([4], dtype=dtype, device=values.device)
        GlooReduceScatter()(ours, values, dist.group.WORLD, op)
        theirs = torch.empty_like(ours)
        dist.reduce_scatter_tensor(theirs, values, op=op)
        found.append((ours, theirs))
    return found


def test_a_part_is_that_of_torch() -> None:
    """Sums and means of small whole numbers are exact in each of the types."""
    for answer in run_ranks(both, 3):
        for ours, theirs in answer:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def others(env: DistEnv) -> list[torch.Tensor]:
    """Return the parts of a maximum, and of a sum that is waited for."""
    assert dist.group.WORLD is not None
    values = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (env.rank + 1)
    largest, later = torch.empty(2), torch.empty(2)
    GlooReduceScatter()(largest, values, dist.group.WORLD, ReduceOp.MAX)
    work = GlooReduceScatter()(later, values, dist.group.WORLD, ReduceOp.SUM, async_op=True)
    assert work is not None
    work.wait()
    return [largest, later]


def test_what_fsdp_seldom_asks_for_is_torchs_own() -> None:
    """No other operation is taken for a sum, and none that runs on for one that has ended."""
    first, second = run_ranks(others, 2)
    assert [one.tolist() for one in first] == [[2.0, 4.0], [3.0, 6.0]]
    assert [one.tolist() for one in second] == [[6.0, 8.0], [9.0, 12.0]]


class Collectives(TorchDispatchMode):
    """Counts the calls of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        namespace, _, name = func.name().partition("::")
        self.calls[name] += namespace == "c10d"
        return func(*args, **(kwargs or {}))


def sent(env: DistEnv, config: Config) -> Counter[str]:
    """Return how often each collective is called in a forward and backward."""
    state = build(env, config)
    batch = next(iter(steps_of(state.batches)))
    with Collectives() as found:
        state.engine.backward(state, batch)
    return +found.calls  # without the operators that are no collectives


@pytest.mark.parametrize(
    ("keys", "gathered"),
    first_of(
        [((), 2 * NUM_BLOCKS), (("parallelism.reshard_after_forward=false",), NUM_BLOCKS + 1)]
    ),
)
def test_a_block_is_sent_as_often_as_it_must(keys: tuple[str, ...], gathered: int) -> None:
    """The last block, and what is outside of blocks, are gathered once: their backward is next."""
    config = compose_config(*GPT, "parallelism=fsdp", *keys, world_size=2)
    for found in run_ranks(sent, 2, config):
        assert found == {"_allgather_base_": gathered, "alltoall_base_": NUM_BLOCKS + 1}
