"""What a run's ranks can do at most: operations of a sample, matrix products, all-reduces."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, library, nn
from torch.nn.functional import scaled_dot_product_attention
from train_states import TOY, Trace, build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.train import flops, metrics, peaks
from ddp_runner.train.flops import count_flops, matmul_flops_per_s

CPU = torch.device("cpu")
MEASURED = {"perf/mfu", "perf/all_reduces", "perf/all_reduce_mib", "perf/all_reduce_ms"}
WEIGHTS = nn.Parameter(torch.ones(2, 2))


def attention(inputs: Tensor) -> Tensor:
    """Attend from each of (1, 1, 6, 8) to all, after a projection that makes gradients flow."""
    return scaled_dot_product_attention(inputs, inputs, inputs)


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        # Forward, and the weights' gradients: rows x 3 x 4 multiplications and additions each.
        (nn.Linear(3, 4), torch.ones(5, 3), 2 * 2 * 5 * 3 * 4),
        # The second layer also has its inputs' gradients.
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
            torch.ones(5, 3),
            2 * 2 * 5 * 3 * 4 + 3 * 2 * 5 * 4 * 2,
        ),
        # 2 x 2 kernels of 3 channels, at 4 x 4 places of 6 channels.
        (nn.Conv2d(3, 6, 2), torch.ones(1, 3, 5, 5), 2 * 2 * (3 * 2 * 2) * (6 * 4 * 4)),
        (nn.LSTM(3, 4), torch.ones(5, 1, 3), None),  # oneDNN's layer has no formula
        (nn.Embedding(3, 4), torch.tensor([1]), None),  # nothing is multiplied
        (nn.Bilinear(3, 3, 4), torch.ones(5, 3), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_operations_are_counted_or_unknown(
    module: nn.Module, inputs: Tensor, expected: int | None
) -> None:
    """Better no count than one that is too low; and no gradient is left behind."""

    def loss() -> Tensor:
        outputs = module(inputs, inputs) if isinstance(module, nn.Bilinear) else module(inputs)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).sum()

    assert count_flops(loss, list(module.parameters())) == expected
    assert all(parameter.grad is None for parameter in module.parameters())


def test_attention_is_counted() -> None:
    """A transformer's attention is a large part of it; on a CPU it is an operator of its own."""
    linear = nn.Linear(8, 8, bias=False)

    def loss() -> Tensor:
        return attention(linear(torch.ones(1, 1, 6, 8))).sum()

    linear_flops, product = 2 * 2 * 6 * 8 * 8, 2 * 6 * 6 * 8
    counted = count_flops(loss, list(linear.parameters()))
    assert counted is not None
    # Two products forward; backward four, and the scores once more if they were not kept.
    assert (counted - linear_flops) / product in (6, 7)


def test_a_kernel_of_somebody_has_no_formula() -> None:
    """It may be the attention of another library, so the count would be too low."""

    @library.custom_op("peaks_test::double", mutates_args=())
    def double(inputs: Tensor) -> Tensor:
        return inputs * 2

    double.register_autograd(lambda _, gradient: gradient * 2)
    linear = nn.Linear(3, 3)
    assert count_flops(lambda: linear(torch.ones(1, 3)).sum(), list(linear.parameters()))
    parameters = list(linear.parameters())
    assert count_flops(lambda: double(linear(torch.ones(1, 3))).sum(), parameters) is None


def test_the_matmul_peak_counts_each_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU both stages of a model share a device; a product takes what the clock says."""
    monkeypatch.setattr(flops, "_timed", lambda factor, _, count: count * 0.01)
    assert matmul_flops_per_s([CPU, CPU], torch.float32) == pytest.approx(2 * 256**3 / 0.01)


def test_the_matmul_peak_is_that_of_large_products() -> None:
    """Any CPU takes more than a million operations a second, and the budget is kept."""
    began = time.process_time()
    assert matmul_flops_per_s([CPU], torch.float32) > 1e6
    assert time.process_time() - began < 60


def train_and_measure(env: DistEnv, config: Config, after_s: float) -> tuple[Trace, Any]:
    """Train four steps; return the trace, and what run.json keeps."""
    metrics.AFTER_S = after_s
    state = build(env, config)
    return run_loop(env, config, max_steps=4, state=state), state.measured


def without_times(trace: Trace) -> list[dict[str, float]]:
    """Return the lines of a run without what depends on the clock."""
    return [{key: line[key] for key in line if "perf/" not in key} for line in trace.lines]


@pytest.mark.parametrize("model", ["convnet", "mnist_net"])
def test_measuring_changes_no_step(model: str) -> None:
    """Neither the statistics of BatchNorm, nor random numbers, nor gradients."""
    config = compose_config(
        *(f"model={model}", "dataset=fake_images", "dataset.num_samples=64"),
        *("batch.global_size=8", "train.log_every_steps=1"),
        world_size=2,
    )
    (measured, fields), _ = run_ranks(train_and_measure, 2, config, 0.0)
    (undisturbed, nothing), _ = run_ranks(train_and_measure, 2, config, 1e9)
    assert without_times(measured) == without_times(undisturbed)
    assert "eval/loss" in measured.lines[-1]  # BatchNorm's statistics only matter there
    assert torch.equal(measured.weights, undisturbed.weights)
    # From the line after the first one on, with the same figures in each but the pace.
    first, *lines = [line for line in measured.lines if "train/loss" in line]
    assert not MEASURED & first.keys()
    assert all(line.keys() >= MEASURED for line in lines)
    assert not any(MEASURED & line.keys() for line in undisturbed.lines)
    assert {"flops_per_sample", "matmul_flops_per_s"} <= fields.keys() - nothing.keys()
    for line in lines:
        rate = fields["flops_per_sample"] * line["perf/samples_per_s"]
        assert line["perf/mfu"] == pytest.approx(rate / fields["matmul_flops_per_s"])
    # All buckets together have all gradients.
    num_bytes = lines[-1]["perf/all_reduces"] * lines[-1]["perf/all_reduce_mib"] * peaks.MIB
    assert num_bytes == pytest.approx(4 * measured.weights.numel())


@pytest.mark.parametrize("mode", ["single", "ps"])
def test_who_exchanges_no_gradients_times_no_all_reduce(mode: str) -> None:
    """One rank still has its utilisation; a server computes no gradients."""
    num_ranks = 1 if mode == "single" else 2
    config = compose_config(
        *(*TOY, f"parallelism={mode}", "train.log_every_steps=1"), world_size=num_ranks
    )
    (trace, _), *_ = run_ranks(train_and_measure, num_ranks, config, 0.0)
    found = MEASURED & trace.lines[-1].keys() | MEASURED & trace.lines[-2].keys()
    assert found == ({"perf/mfu"} if mode == "single" else set())


def fails(*_: object) -> Tensor:
    """Raise, as a step of the user's may without its wrapped model."""
    raise RuntimeError("this loss needs DDP")


def measure_alone(env: DistEnv, loss: Callable[[], Tensor], failing_rank: int) -> peaks.Peaks:
    """Measure on several ranks, of which one cannot."""
    return peaks.measure_peaks(
        fails if env.rank == failing_rank else loss,
        parameters=[WEIGHTS],
        num_samples=2,
        all_reduces=(8, 16),
        devices=(CPU,),
        dtype=torch.float32,
        group=None,
    )


def product() -> Tensor:
    """Return a loss of 2 x 2 x 2 multiplications and additions."""
    return (WEIGHTS @ torch.ones(2, 2)).sum()


def test_what_one_rank_cannot_measure_nobody_has() -> None:
    """The others neither wait for it nor give a figure that lacks its part."""
    measured = run_ranks(measure_alone, 3, product, 1)
    assert [(one.flops_per_sample, one.flops_per_s) for one in measured] == [(None, None)] * 3
    assert all(one.all_reduce_ms > 0 for one in measured)
    assert set(measured[0].metrics(samples_per_s=1.0)) == MEASURED - {"perf/mfu"}
    known = run_ranks(measure_alone, 3, product, -1)[0]
    assert known.flops_per_sample == 2 * 2 * 2**3 / 2  # a forward and a backward, of two samples
    assert known.metrics(samples_per_s=10.0)["perf/all_reduce_mib"] == 12 / peaks.MIB
