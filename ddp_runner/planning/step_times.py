"""The time of a planned step: between the sum and the maximum of computing and sending."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.config.planned_gpus import PlanConfig
from ddp_runner.planning.rank_trace import RankTrace
from ddp_runner.planning.step_tracker import Collective

TWICE = {"all-reduce"}  # a reduce-scatter, then an all-gather


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step."""

    computing: float
    sending: float

    @property
    def not_overlapped(self) -> float:
        """The time if no collective hides behind the computation."""
        return self.computing + self.sending

    @property
    def overlapped(self) -> float:
        """The time if all that can hide does."""
        return max(self.computing, self.sending)


def step_times(traces: Sequence[RankTrace], gpu: PlanConfig, *, bubble: float) -> StepTimes:
    """Return the times of a step on these GPUs; no figure may be None.

    Args:
        traces: of a rank, or of one with each stage of a pipeline; the slowest decides.
        gpu: the figures.
        bubble: share of the step in which a rank waits for other stages.
    """
    assert gpu.tflops is not None
    most = max(trace.flops for trace in traces)
    computing = most / (gpu.tflops * 1e12 * gpu.efficiency) / (1.0 - bubble)
    sending = max(sum(sending_s(one.calls, one.sent, gpu).values()) for one in traces)
    return StepTimes(1e3 * computing, 1e3 * sending)


def sending_s(
    calls: Mapping[Collective, int], sent: Mapping[Collective, int], gpu: PlanConfig
) -> dict[Collective, float]:
    """Return the seconds of each collective: latency x hops + bytes x (n - 1) / n / link.

    NCCL's trees have as many hops as the logarithm of the group.
    """
    assert gpu.ranks_per_node is not None
    assert gpu.latency_us is not None
    seconds = {}
    for one, count in calls.items():
        is_near = one.first // gpu.ranks_per_node == one.last // gpu.ranks_per_node
        link = gpu.node_gb_s if is_near else gpu.net_gb_s
        assert link is not None
        rounds, size = 1 + (one.kind in TWICE), one.group_size
        hops = 1 if one.kind == "send" else rounds * math.ceil(math.log2(size))
        moved = rounds * sent[one] * (1.0 if one.kind == "send" else (size - 1) / size)
        seconds[one] = count * hops * gpu.latency_us / 1e6 + moved / (link * 1e9)
    return seconds
