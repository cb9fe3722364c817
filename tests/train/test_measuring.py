"""When a run measures: one step is counted, no slow step is in a figure, and all ranks agree."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from injection import At, Fault
from ranks import run_ranks
from run_folders import metrics, record
from tiers import first_of
from torch import nn
from train_states import TOY, Trace, build, compose_config, run_loop
from trainings import NUM_STEPS as RUN_STEPS
from trainings import run_training

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.profiling.profiler import NullProfiler
from ddp_runner.train import measuring
from ddp_runner.train import metrics as step_metrics
from ddp_runner.train.flops import FlopCounter
from ddp_runner.train.measuring import count_before_compiling, measure_peaks
from ddp_runner.train.metrics import MEMORY
from ddp_runner.train.peaks import Peaks
from ddp_runner.train.step_timer import UNMEASURED_STEPS

NUM_STEPS = 8
NUMBERED = (
    *("dataset=torch_dataset", "dataset.eval={_target_:own_streams.Plain,size:7}"),
    *("allowed_targets=[own_streams]", "train.step=own_streams.numbered", "dataset.num_workers=0"),
    *("model=toy", "model._target_=torch.nn.Linear", "+model.in_features=4"),
    *("+model.out_features=1", "optimizer.lr=0.01", "batch.per_rank=4"),
)


class Slow(NullProfiler):
    """A trace of some steps that writes nothing."""

    def __init__(self, slow: Collection[int]) -> None:
        self._slow, self.is_slow = slow, 1 in slow

    def step_done(self, step: int) -> None:
        """Be slow in some steps."""
        self.is_slow = step + 1 in self._slow


@dataclass(frozen=True)
class Training:
    """What a rank has measured of a training."""

    trace: Trace
    num_skew_steps: int
    counted_at: list[int]  # the steps that were counted
    measured_at: list[int]  # the steps after which the ranks measured
    flops: int | None
    num_samples: int
    why_unknown: str


def train(
    env: DistEnv,
    config: Config,
    slow: Collection[int] = (),
    unknown: str = "",
    compiled_on: int = -1,
) -> Training:
    """Train some steps.

    Args:
        env: of this rank.
        config: of the run.
        slow: the steps that are traced.
        unknown: why a run cannot count, if it has known that before.
        compiled_on: a rank on which something is compiled.
    """
    step_metrics.SETTLED_S = 0.0
    counted_at, measured_at, state = list[int](), list[int](), build(env, config)
    counting = FlopCounter.counting

    def count(counter: FlopCounter, *, num_samples: int) -> AbstractContextManager[None]:
        counted_at.append(state.position.step + 1)
        return counting(counter, num_samples=num_samples)

    def measure(*args: Any, **keys: Any) -> Peaks:
        measured_at.append(state.position.step)
        return measure_peaks(*args, **keys)

    FlopCounter.counting, measuring.measure_peaks = count, measure
    measuring.has_compiled = lambda: env.rank == compiled_on
    state.setup = replace(state.setup, profiler=Slow(slow))
    state.counter = FlopCounter(unknown=unknown) if unknown else None
    trace = run_loop(env, config, max_steps=NUM_STEPS, state=state)
    counter = state.counter
    assert counter is not None
    return Training(
        trace,
        state.skew.num_steps,
        counted_at,
        measured_at,
        counter.flops,
        counter.num_samples,
        counter.why_unknown,
    )


def toy(*keys: str, world_size: int = 2) -> Config:
    """Return the config of a small run without evaluations."""
    return compose_config(*TOY, "train.eval_every_epochs=0", *keys, world_size=world_size)


def timed(trace: Trace) -> list[float]:
    """Return the steps whose lines have times."""
    lines = [line for line in trace.lines if "train/loss" in line]
    assert all(MEMORY in line for line in lines)
    has_times = [any("perf/" in key for key in line.keys() - {MEMORY}) for line in lines]
    return [line["step"] for line, one in zip(lines, has_times, strict=True) if one]


@pytest.mark.parametrize(
    ("every", "slow", "expected", "num_skew_steps", "counted_at"),
    first_of(
        [
            (1, (3, 4), [1, 2, 6, 7, 8], 3, 5),
            (1, (), [1, 2, 4, 5, 6, 7, 8], 5, 3),
            (2, (), [2, 4, 6, 8], 5, 3),  # step 3 is in no line of its own, nor in that of step 4
            (4, (), [4, 8], 5, 5),
        ]
    ),
)
def test_a_step_that_is_slowed_down_is_in_no_time(
    every: int, slow: tuple[int, ...], expected: list[int], num_skew_steps: int, counted_at: int
) -> None:
    """Neither a traced one nor the one that is counted, which is never the same."""
    config = toy(f"train.log_every_steps={every}")
    for one in run_ranks(train, 2, config, slow):
        assert timed(one.trace) == expected
        assert one.num_skew_steps == num_skew_steps
        assert one.counted_at == one.measured_at == [counted_at]


@pytest.mark.full
def test_nothing_is_measured_while_steps_are_traced() -> None:
    """The trace would show it, and its figures would be those of a slow machine."""
    config = toy("train.log_every_steps=1")
    assert run_ranks(train, 2, config, (2, 3), "it cannot")[0].measured_at == [3]
    # There is no step to be counted first.
    assert run_ranks(train, 2, config, (), "it cannot")[0].measured_at == [UNMEASURED_STEPS]


def test_what_one_rank_cannot_count_no_rank_counts() -> None:
    """They agree, so they measure after the same step."""
    trainings = run_ranks(train, 2, toy("train.log_every_steps=1"), (), "", 1)
    for one in trainings:
        assert (one.flops, one.measured_at) == (None, [UNMEASURED_STEPS])
        assert "perf/mfu" not in one.trace.lines[-1]
    assert [one.why_unknown for one in trainings] == [
        "another rank has compiled a part of it",
        "a part of it is compiled by torch.compile",
    ]


@pytest.mark.parametrize("size", first_of([9, 12]))
def test_a_doubled_sample_counts_as_two(size: int) -> None:
    """The third step of a stream of 9 in batches of 4 has one sample, twice, for BatchNorm."""
    config = compose_config(
        *NUMBERED,
        f"dataset.train={{_target_:own_streams.Plain,size:{size}}}",
        "train.log_every_steps=1",
    )
    (one,) = run_ranks(train, 1, config)
    assert one.flops / one.num_samples == 2 * 2 * 4  # forward, and the weights' gradients


def count_first(env: DistEnv, config: Config) -> tuple[int | None, str]:
    """Count as a compiled run does."""
    state = build(env, config)
    if config.parallelism["_target_"].endswith("DataParallelMode"):
        state.model = nn.DataParallel(state.module)  # as with more than one GPU
    count_before_compiling(state)
    assert state.counter is not None
    return state.counter.flops, state.counter.why_unknown


def test_a_compiled_run_with_a_server_has_no_utilisation() -> None:
    """Its trainers' operations are not those of the server, whose peak is measured."""
    found = run_ranks(count_first, 3, toy("parallelism=ps", world_size=3))
    assert found == [(None, "a parameter server computes no gradients")] * 3


def test_replicas_on_several_devices_have_no_utilisation() -> None:
    """Each has a part of the operations."""
    ((flops, why_unknown),) = run_ranks(count_first, 1, toy("parallelism=dp", world_size=1))
    assert (flops, why_unknown) == (None, "the replicas of parallelism=dp are on several devices")


def settle() -> None:
    """Let the run be settled at once."""
    step_metrics.SETTLED_S = 0.0


@pytest.mark.full
def test_a_compiled_run_counts_before_it_compiles(tmp_path: Path) -> None:
    """The real command does so by itself; then no step is counted, and none is without times."""
    faults = (Fault(settle, At(rank, 1)) for rank in (0, 1))
    keys = ("train.compile=true", "train.max_steps=6")
    # Compiling takes half a minute; switched off, a step that is counted would show itself.
    switch = {"TORCHDYNAMO_DISABLE": "1"}
    end = run_training(tmp_path, *faults, args=keys, environ=switch)
    assert (end.exit_code, end.stderr) == (0, "")
    lines = [line for line in metrics(end.run_dir) if "train/loss" in line]
    assert all("perf/step_time_ms" in line for line in lines)
    rate = record(end.run_dir)["flops_per_sample"] * lines[-1]["perf/samples_per_s"]
    assert lines[-1]["perf/mfu"] == pytest.approx(rate / record(end.run_dir)["matmul_flops_per_s"])


@pytest.mark.full
def test_the_skew_has_no_traced_step(tmp_path: Path) -> None:
    """After the trace four steps are left, too few; the line that ends with them has 16 in all."""
    end = run_training(tmp_path, args=("train.profile=3-14", f"train.log_every_steps={RUN_STEPS}"))
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["skew_ms_by_rank"] is None
    assert "perf/skew_ms" in [line for line in metrics(end.run_dir) if "train/loss" in line][-1]
