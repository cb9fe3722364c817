"""The time of a planned step: between the sum and the maximum of computing and sending."""

import math
from collections.abc import Iterator, Sequence

from ddp_runner.config.planned_gpus import PlanConfig
from ddp_runner.planning.rank_trace import RankTrace


def step_times(
    traces: Sequence[RankTrace], gpu: PlanConfig, *, bubble: float
) -> tuple[float, float]:
    """Return the milliseconds of computing and of sending; no figure of the GPU may be None.

    Of the traces, one for each stage of a pipeline, the slowest decides. `bubble` is the share of
    the step in which a rank waits for other stages.
    """
    assert gpu.tflops is not None
    most = max(trace.flops for trace in traces)
    computing = most / (gpu.tflops * 1e12 * gpu.efficiency) / (1.0 - bubble)
    return 1e3 * computing, 1e3 * max(sum(sending_s(trace, gpu)) for trace in traces)


def sending_s(trace: RankTrace, gpu: PlanConfig) -> Iterator[float]:
    """Yield the seconds of each collective: latency x hops + bytes x (n - 1) / n / link.

    NCCL's trees have as many hops as the logarithm of the group. Between machines each rank of the
    group sends over a link of its own.
    """
    assert gpu.ranks_per_node is not None
    assert gpu.latency_us is not None
    assert gpu.node_gb_s is not None
    assert gpu.net_gb_s is not None
    for one, count in trace.calls.items():
        link = gpu.node_gb_s
        nodes = one.last // gpu.ranks_per_node - one.first // gpu.ranks_per_node + 1
        if nodes > 1:
            link = min(link, gpu.net_gb_s * max(1.0, one.group_size / nodes))
        hops, share = math.ceil(math.log2(one.group_size)), (one.group_size - 1) / one.group_size
        if one.kind == "send":
            hops, share = 1, 1.0
        rounds = 2 if one.kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
        latency_s = count * rounds * hops * gpu.latency_us / 1e6
        yield latency_s + rounds * trace.sent[one] * share / (link * 1e9)
