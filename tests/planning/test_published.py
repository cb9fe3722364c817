"""A plan beside published measurements: torchtitan's Llama 3 8B on H100."""

import pytest
from llama import LLAMA_8B
from ranks import run_ranks
from train_states import compose_config

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.planning.plan_task import GIB
from ddp_runner.planning.rank_trace import RankTrace, trace_rank

# World size, sequences of 8192 tokens a rank, and the peak of reserved memory in GiB:
# benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, eager; pull request 808, compiled.
ROWS = [(8, 2, 82.4), (128, 2, 67.0), (8, 1, 47.65)]


def planned(env: DistEnv, config: Config) -> RankTrace:
    """Trace rank 0."""
    return trace_rank(config, rank=0, log=print)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sequences", "reserved_gib"), ROWS)
def test_live_bytes_are_most_of_what_is_reserved(
    ranks: int, sequences: int, reserved_gib: float
) -> None:
    """The rest is the allocator's and NCCL's."""
    config = compose_config(*LLAMA_8B, "task=plan", f"batch.per_rank={sequences}", world_size=ranks)
    (trace,) = run_ranks(planned, 1, config, backend=None, timeout_s=600)
    assert 0.80 <= trace.peak / GIB / reserved_gib <= 0.97
