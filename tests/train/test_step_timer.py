"""What a step's time goes into: computing, exchanging, and waiting for a slow rank."""

import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiers import first_of
from torch import nn
from train_states import TOY, Trace, build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.metric_names import StepPart
from ddp_runner.train import step_timer
from ddp_runner.train.step_timer import MOST_EXCHANGES, UNMEASURED_STEPS, StepTimer

NAP_S = 0.3
COMPUTED = {"perf/data_ms", "perf/forward_ms", "perf/backward_ms", "perf/optimizer_ms"}
EXCHANGED = {
    *("perf/comm_ms", "perf/wait_ms", "perf/comm_share"),
    *("perf/skew_ms", "perf/skew_rank"),
}
WHOLE = {"perf/step_time_ms", "perf/samples_per_s", "perf/peak_memory_gib"}


def loop_with_a_slow_rank(
    env: DistEnv, config: Config, slow_rank: int | None, folder: Path
) -> Trace:
    """Run five steps; a slow rank sleeps in each forward, once the others have their gradients."""
    state = build(env, config)
    first = next(state.module.parameters())  # its gradient is the last one
    done = (folder / f"{env.rank}-{number}" for number in count())
    first.register_post_accumulate_grad_hook(lambda _: next(done).touch())
    others = [rank for rank in range(env.world_size) if rank != env.rank]
    numbers = count()

    def sleep(module: nn.Module, _: object) -> None:
        if module.training:
            number = next(numbers)
            while not all((folder / f"{rank}-{number}").exists() for rank in others):
                time.sleep(0.001)
            time.sleep(NAP_S)

    if env.rank == slow_rank:
        state.module.register_forward_pre_hook(sleep)
    return run_loop(env, config, max_steps=5, state=state)


def lines_of(trace: Trace) -> list[dict[str, float]]:
    """Return the lines of training, without the warm-up."""
    return [line for line in trace.lines if "train/loss" in line][UNMEASURED_STEPS:]


@pytest.mark.full
@pytest.mark.parametrize("accumulated", first_of([1, 2]))
def test_what_others_lose_to_a_slow_rank_is_waiting(accumulated: int, tmp_path: Path) -> None:
    """Rank 0 waits as long as rank 1 sleeps; over both that is half a nap a micro-step."""
    config = compose_config(
        *TOY, "train.log_every_steps=1", f"train.grad_accum_steps={accumulated}", world_size=2
    )
    traces = run_ranks(loop_with_a_slow_rank, 2, config, 1, tmp_path)
    for trace in traces:
        for line in lines_of(trace):
            assert {key for key in line if "perf/" in key} == COMPUTED | EXCHANGED | WHOLE
            assert line["perf/forward_ms"] >= 1000 * NAP_S / 2
            assert line["perf/comm_share"] == pytest.approx(
                line["perf/comm_ms"] / line["perf/step_time_ms"]
            )
        # A busy machine may delay rank 1 after the exchange, but hardly by half a nap in each step.
        assert max(line["perf/wait_ms"] for line in lines_of(trace)) > 0.5 * 1000 * NAP_S / 2
    # The parts are means over the ranks; a rank's steps take at least as long as their parts.
    for lines in zip(*map(lines_of, traces), strict=True):
        parts = sum(lines[0][key] for key in COMPUTED | {"perf/comm_ms", "perf/wait_ms"})
        assert parts <= 1.001 * sum(line["perf/step_time_ms"] for line in lines) / len(lines)


@pytest.mark.full
def test_one_process_exchanges_nothing(tmp_path: Path) -> None:
    """There is no line of communication where there is nobody to talk to."""
    config = compose_config(*TOY, "parallelism=single", "train.log_every_steps=1")
    (trace,) = run_ranks(loop_with_a_slow_rank, 1, config, 0, tmp_path)
    for line in lines_of(trace):
        assert {key for key in line if "perf/" in key} == COMPUTED | WHOLE
        assert line["perf/forward_ms"] >= 1000 * NAP_S


def test_parts_are_those_of_the_mean_step() -> None:
    """Time between marks is added up over the steps of a lap; the next starts at nothing."""
    pace = StepTimer(torch.device("cpu"))
    for _ in range(4):
        time.sleep(0.01)
        pace.mark(StepPart.DATA)
        pace.mark(StepPart.FORWARD)
        pace.mark(None)
        pace.add(samples=8)
    lap = pace.lap()
    assert set(lap.parts) == {"data", "forward"}
    assert 10 <= lap.parts["data"] <= lap.metrics["perf/step_time_ms"]
    each_step = lap.metrics["perf/samples_per_s"] * lap.metrics["perf/step_time_ms"] / 1000
    assert each_step == pytest.approx(8)
    pace.mark(StepPart.OPTIMIZER)
    pace.add(samples=8)
    assert set(pace.lap().parts) == {"optimizer"}


@pytest.mark.parametrize("late", [0, 3, 7])
def test_each_wait_for_data_counts_where_few_steps_are_measured(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight workers deliver eight batches at once: every eighth step waits, perhaps unmeasured."""
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    pace = StepTimer(torch.device("cpu"))
    pace.choose_steps(1.0)
    for step in range(32):
        pace.mark(None)
        clock.seconds += 0.008 if step % 8 == late else 0.0
        pace.mark(StepPart.DATA)
        clock.seconds += 0.002
        pace.mark(StepPart.FORWARD)
        pace.add(samples=1)
    lap = pace.lap()
    assert lap.parts == {"data": pytest.approx(1.0), "forward": pytest.approx(2.0)}
    assert lap.metrics["perf/step_time_ms"] == pytest.approx(3.0)


@dataclass
class Clock:
    """A clock that a test moves on."""

    seconds: float = 100.0

    def perf_counter(self) -> float:
        """Return the time."""
        return self.seconds


def test_work_is_what_a_rank_does_between_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log line loses none of it; what is no part of a step, such as a checkpoint, never counts.

    The first two are a warm-up, in which ranks connect and DDP forms its buckets. Time that a rank
    waits before an exchange, as the ranks of a stream do, is no work of its own.
    """
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    pace = StepTimer(torch.device("cpu"))

    def step() -> None:
        before = ((None, 5), ("data", 1), ("wait", 4), ("forward", 10), ("backward", 20))
        for part, ms in (*before, ("comm", 7)):
            clock.seconds += ms / 1000
            pace.mark(None if part is None else StepPart(part))
        clock.seconds += 0.003
        pace.mark(StepPart.OPTIMIZER)
        pace.add(samples=1)

    step()
    step()
    assert not pace.lap().exchanges
    clock.seconds += 0.1  # to log a line
    pace.mark(None)
    step()
    step()
    (first, second) = pace.lap().exchanges
    assert [first, second] == [pytest.approx((34, 11))] * 2
    step()
    clock.seconds += 0.1  # to evaluate
    pace.restart()
    step()
    lap = pace.lap()
    assert [work_ms for work_ms, _ in lap.exchanges] == [pytest.approx(34)] * 2
    assert lap.parts["data"] == pytest.approx(1)  # the pace is that of the step since then
    assert lap.metrics["perf/step_time_ms"] == pytest.approx(50)
    for _ in range(3 * MOST_EXCHANGES):
        step()
    assert len(pace.lap().exchanges) == MOST_EXCHANGES
    step()
    pace.forget()  # a trace has slowed it down
    step()
    assert len(pace.lap().exchanges) == 1
