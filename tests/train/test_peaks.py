"""What a run's ranks can do at most: operations of a sample, matrix products."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from train_states import TOY, Trace, build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.train import flops, metrics, peaks
from ddp_runner.train.flops import FlopCounter, matmul_flops_per_s
from ddp_runner.train.measuring import count_before_compiling

CPU = torch.device("cpu")


def test_the_matmul_peak_counts_each_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU both stages of a model share a device; a product takes what the clock says."""
    monkeypatch.setattr(flops, "_timed", lambda factor, _, count: count * 0.01)
    assert matmul_flops_per_s([CPU, CPU], torch.float32) == pytest.approx(2 * 256**3 / 0.01)


def test_the_matmul_peak_is_that_of_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones and the first of a size, which may load a kernel, only choose the size."""
    calls = list[tuple[int, int]]()

    def timed(factor: Tensor, product: Tensor, *, count: int) -> float:
        assert torch.equal(product, factor @ factor)  # has been computed once before
        calls.append((len(factor), count))
        return count * (len(factor) / 1024) ** 3 * flops.BUDGET_S / 4

    monkeypatch.setattr(flops, "_timed", timed)
    peak = matmul_flops_per_s([CPU], torch.float32)
    assert calls == [(256, 1), (512, 1), (1024, 1), (1024, 4)]
    assert peak == pytest.approx(2 * 1024**3 * 4 / flops.BUDGET_S)


def train_and_measure(
    env: DistEnv, config: Config, after_s: float, draws: bool, counts_first: bool = False
) -> tuple[Trace, Any]:
    """Train five steps; return the trace, and what run.json keeps."""
    metrics.SETTLED_S = after_s
    state = build(env, config)
    if config.train.compile or counts_first:  # what a run that compiles does
        count_before_compiling(state)
    if draws:
        state.module.register_forward_pre_hook(Drawing())
    return run_loop(env, config, max_steps=5, state=state), state.measured


class Drawing:
    """Adds noise to a model's inputs, from every generator there is, and counts its calls."""

    def __init__(self) -> None:
        self.own, self.num_calls = torch.Generator().manual_seed(1), 0

    def __call__(self, module: object, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Change the inputs of a forward."""
        self.num_calls += 1
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.own)
        return (inputs[0] + 0.01 * (noise + torch.rand(()) + self.num_calls),)


def without_times(trace: Trace) -> list[dict[str, float]]:
    """Return the lines of a run without what depends on the clock."""
    return [{key: line[key] for key in line if "perf/" not in key} for line in trace.lines]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("model=convnet",), marks=pytest.mark.full),
        ("model=mnist_net", "train.grad_accum_steps=2", "train.precision=bf16"),
        pytest.param(
            ("model=convnet_mp", "parallelism=ddp_mp", "parallelism.static_graph=true"),
            marks=pytest.mark.full,
        ),
        pytest.param(("model=convnet", "train.compile=true"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_measuring_changes_no_step(keys: tuple[str, ...]) -> None:
    """Neither BatchNorm's statistics, nor random numbers of any kind, nor gradients."""
    config = compose_config(
        *(*keys, "dataset=fake_images", "dataset.num_samples=80"),
        *("batch.global_size=8", "train.log_every_steps=1"),
        world_size=2,
    )
    draws = not config.train.compile
    (measured, fields), _ = run_ranks(train_and_measure, 2, config, 0.0, draws)
    (undisturbed, nothing), _ = run_ranks(train_and_measure, 2, config, 1e9, draws)
    assert without_times(measured) == without_times(undisturbed)
    assert "eval/loss" in measured.lines[-1]  # BatchNorm's statistics only matter there
    assert torch.equal(measured.weights, undisturbed.weights)
    # Two steps warm up. The third one is counted, unless it is compiled; then the ranks measure.
    lines = [line for line in measured.lines if "train/loss" in line]
    num_before = 2 if config.train.compile else 3
    assert not any("perf/mfu" in line for line in (*lines[:num_before], *undisturbed.lines))
    for line in lines[num_before:]:
        rate = fields["flops_per_sample"] * line["perf/samples_per_s"]
        assert line["perf/mfu"] == pytest.approx(rate / fields["matmul_flops_per_s"])
    assert nothing["flops_per_sample"] is None is nothing["matmul_flops_per_s"]


def test_the_count_is_that_of_one_sample() -> None:
    """Whatever the ranks, micro-batches and modes, and also if it is counted before compiling."""
    counts = set()
    for world_size, counts_first, *keys in (
        (1, False, "parallelism=single"),
        (2, False, "train.grad_accum_steps=2"),
        # The counted step is the last of an epoch, of 4 samples.
        (3, False, "dataset.num_samples=28"),
        (1, True),
    ):
        config = compose_config(
            *("model=convnet", "dataset=fake_images", "dataset.num_samples=96"),
            *("batch.global_size=12", "train.log_every_steps=1", "train.eval_every_epochs=0"),
            *keys,
            world_size=world_size,
        )
        (_, fields), *_ = run_ranks(train_and_measure, world_size, config, 0.0, False, counts_first)
        counts.add(fields["flops_per_sample"])
    assert len(counts) == 1


@pytest.mark.parametrize("mode", ["single", "ps"])
def test_a_server_has_no_utilisation(mode: str) -> None:
    """It computes no gradients; a single rank does."""
    num_ranks = 1 if mode == "single" else 2
    config = compose_config(
        *(*TOY, f"parallelism={mode}", "train.log_every_steps=1"), world_size=num_ranks
    )
    (trace, _), *_ = run_ranks(train_and_measure, num_ranks, config, 0.0, False)
    assert any("perf/mfu" in line for line in trace.lines[-2:]) is (mode == "single")


def measure_alone(env: DistEnv, failing: str) -> peaks.Peaks:
    """Measure on several ranks, of which one cannot do a part of it."""
    weights, fails = torch.ones(2, 2, requires_grad=True), env.rank == 1
    counter = FlopCounter(unknown="it cannot" if fails and failing == "count" else "")
    if not counter.is_over:
        with counter.counting(num_samples=2):
            (weights @ torch.ones(2, 2)).sum().backward()
    if fails and failing == "products":
        peaks.matmul_flops_per_s = no_memory
    return peaks.measure_peaks(counter, devices=(CPU,), dtype=torch.float32, group=None)


def no_memory(*_: object) -> float:
    """Fail as on a full device."""
    raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize("failing", ["count", "products"])
def test_what_one_rank_cannot_measure_nobody_has(failing: str) -> None:
    """The others neither wait for it nor give a figure that lacks its part."""
    measured = run_ranks(measure_alone, 3, failing)
    assert measured == [peaks.Peaks()] * 3
    assert measured[0].metrics(samples_per_s=1.0) == {}


def test_what_all_ranks_can_measure_is_known() -> None:
    """The operations are those of all samples."""
    known = run_ranks(measure_alone, 3, "")[0]
    assert known.flops_per_sample == 2 * 2 * 2**3 / 2  # a forward and a backward of two samples
    assert known.metrics(samples_per_s=10.0) == {"perf/mfu": 16 * 10.0 / known.flops_per_s}


def measure_split(env: DistEnv, mode: str) -> tuple[dict[str, float], Any]:
    """Train the toy in a mode; return the last line, and what run.json keeps."""
    metrics.peak_memory_gib = lambda: 1.0 + env.rank
    keys = (f"parallelism={mode}", "train.eval_every_epochs=0", "train.log_every_steps=1")
    config = compose_config(*TOY, *keys, world_size=env.world_size)
    trace, measured = train_and_measure(env, config, 0.0, draws=False)
    return trace.lines[-1], measured


@pytest.mark.full
def test_the_parts_of_a_split_model_have_as_many_operations_as_one_process() -> None:
    """Nothing is communication apart, and the memory is that of the rank that needs most."""
    ((_, alone),) = run_ranks(measure_split, 1, "single")
    for mode in ("fsdp", "tp"):
        for line, measured in run_ranks(measure_split, 2, mode):
            assert measured["flops_per_sample"] == alone["flops_per_sample"] == 700
            assert line["perf/mfu"] > 0
            assert not {"perf/comm_ms", "perf/wait_ms", "perf/skew_ms"} & line.keys()
            assert line["perf/peak_memory_gib"] == 2.0
            assert measured["peak_memory_gib_by_rank"] == [1.0, 2.0]
            assert measured["skew_ms_by_rank"] is None
