"""Ranks find out how far their clocks are apart."""

import time

import pytest
from ranks import run_ranks

from ddp_runner.dist_env import DistEnv
from ddp_runner.profiling.clocks import clock_ahead_ns


def measure(env: DistEnv, ahead_s: float) -> int:
    """Return what a rank finds out, with the clocks of rank 1 and up ahead by so much each."""
    return clock_ahead_ns(now_ns=lambda: time.time_ns() + round(1e9 * ahead_s * env.rank))


def test_ranks_of_one_machine_have_one_clock() -> None:
    """No difference is exactly that: a trace of one machine is not shifted by chance."""
    assert run_ranks(measure, 3, 0.0) == [0, 0, 0]


@pytest.mark.parametrize("ahead_s", [1.0, -0.5])
def test_a_clock_that_differs_is_found(ahead_s: float) -> None:
    """Of each rank, ahead or behind; the shortest of many round trips limits the error."""
    zero, *others = run_ranks(measure, 3, ahead_s)
    assert zero == 0
    for rank, found in enumerate(others, start=1):
        assert found == pytest.approx(1e9 * ahead_s * rank, abs=10e6)
