"""The parts of a step's time; waiting is no exchange."""

from ddp_runner.metric_names import StepPart
from ddp_runner.train.metrics import part_metrics


def test_the_rank_that_waits_least_tells_the_exchange() -> None:
    """Ranks spend 5, 9 and 4 ms after their backward: 4 of them exchange, the rest is waiting."""
    figures = part_metrics(
        {StepPart.FORWARD: 2.0, StepPart.COMM: 6.0},
        comm_by_rank=[5.0, 9.0, 4.0],
        step_time_ms=16.0,
    )
    assert figures == {
        "perf/forward_ms": 2.0,
        "perf/comm_ms": 4.0,
        "perf/wait_ms": 2.0,
        "perf/comm_share": 0.25,
    }
