"""Times, verdicts and the table of a plan: arithmetic on a trace."""

from dataclasses import replace

import pytest

from ddp_runner.config.planned_gpus import PlanConfig, filled_in, missing
from ddp_runner.planning.plan_task import GIB, plan_metrics, sending_s, step_times, table, verdict
from ddp_runner.planning.rank_trace import RankTrace
from ddp_runner.planning.step_tracker import Collective

GATHER = Collective("all-gather", group_size=8, first=0, last=7)
REDUCE = Collective("all-reduce", group_size=16, first=0, last=15)
TRACE = RankTrace(
    num_parameters=1_000,
    parameters=10 * GIB,
    gradients=10 * GIB,
    optimizer=20 * GIB,
    peak=50 * GIB,
    flops=989e12,
    calls={GATHER: 10, REDUCE: 2},
    sent={GATHER: 4_000_000_000, REDUCE: 1_000_000_000},
)
H100 = filled_in(PlanConfig(gpu="h100", efficiency=0.5), precision="bf16")


def test_a_step_takes_two_times() -> None:
    """FLOP over the peak and the efficiency; hops and bytes over the link of each group."""
    within = 10 * 3 * 10e-6 + 4e9 * 7 / 8 / 450e9
    between = 2 * (2 * 4) * 10e-6 + 2 * 1e9 * 15 / 16 / 400e9  # eight links of a machine
    assert [*sending_s(TRACE, H100)] == pytest.approx([within, between])
    apart = Collective("all-gather", group_size=8, first=3, last=59)  # one rank of each machine
    trace = replace(TRACE, calls={apart: 10}, sent={apart: 4_000_000_000})
    assert [*sending_s(trace, H100)] == pytest.approx([10 * 3 * 10e-6 + 4e9 * 7 / 8 / 50e9])
    times = step_times([TRACE], H100, bubble=0.0)
    assert times == pytest.approx((2000.0, 1000 * (within + between)))
    metrics = plan_metrics(TRACE, times)
    assert metrics["plan/step_ms"] == sum(times)
    assert metrics["plan/step_ms_overlapped"] == pytest.approx(2000.0)
    computing, sending = step_times([TRACE], replace(H100, net_gb_s=0.05), bubble=0.2)
    assert computing == pytest.approx(2500.0)  # a fifth of the step is waiting
    assert plan_metrics(TRACE, (computing, sending))["plan/step_ms_overlapped"] == sending


def test_figures_of_a_gpu_fill_in_what_is_null() -> None:
    """A figure of the user's own stays, and the peak depends on the precision."""
    assert missing(H100) == []
    assert filled_in(PlanConfig(gpu="a100", net_gb_s=12.5), precision="bf16").net_gb_s == 12.5
    assert filled_in(PlanConfig(gpu="a100"), precision="fp32").tflops == 19.5
    assert "tflops" in missing(PlanConfig())
    assert not [name for name in plan_metrics(TRACE, None) if "step_ms" in name]


@pytest.mark.parametrize(
    ("memory_gib", "words"),
    [
        (80.0, "fits: 50.0 of 80 GiB (allow x1.2 for the allocator and NCCL)"),
        (55.0, "may not fit: 50.0 of 55 GiB (allow x1.2 for the allocator and NCCL: 60.0)"),
        (45.0, "does not fit 45 GiB: 50.0 GiB at the peak of a step"),
        (39.5, "does not fit 39.5 GiB: 40.0 GiB of parameters, gradients and optimizer state"),
        (None, None),
    ],
)
def test_the_verdict_is_in_words(memory_gib: float | None, words: str | None) -> None:
    """It names what does not fit; without the memory of a GPU there is none."""
    assert verdict(TRACE, PlanConfig(memory_gib=memory_gib)) == words


def test_the_table_fits_a_terminal() -> None:
    """Memory adds up to the peak; no line has more than 80 columns."""
    lines = [*table(TRACE)]
    assert max(map(len, lines)) <= 80
    sizes = [float(line.split()[-1]) for line in lines[1:6]]
    assert sum(sizes[:4]) == sizes[4] == 50.0
    assert [line.split() for line in lines if "all-reduce" in line] == [
        ["all-reduce", "2", "0.931", "16"]
    ]
