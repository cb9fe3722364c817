"""The model FLOP utilisation: a sample's operations, the matmul peak, and when they are taken."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiers import first_of
from torch import Tensor, nn
from torch.utils.data import Dataset
from train_states import TOY, Trace, build, compose_config, run_loop, with_work

from ddp_runner.config.schema import Config
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.train import step_metrics
from ddp_runner.train.first_batch import try_first_batch
from ddp_runner.train.step import StepOutput
from ddp_runner.train.step_metrics import MEMORY, flops_per_sample, matmul_flops_per_s

CPU, LINEAR = torch.device("cpu"), 2 * 5 * 3 * 4  # a product of (5, 3) and (3, 4)
IMAGES = ("dataset=fake_images", "dataset.num_samples=80", "batch.global_size=8")
GPT = ("model=gpt", "model.num_layers=2", "model.width=16", "model.num_heads=2")
MODES = [
    ("fsdp", (*GPT, "train.activation_checkpointing=true", "train.precision=bf16")),
    ("ddp_mp", ("model=convnet_mp", *IMAGES)),
]
CONV = partial(nn.Conv2d, kernel_size=3, padding=1)


class Teaching(nn.Linear):
    """A step with weights of its own, which it changes."""

    def forward(self, model: nn.Module, data: Tensor) -> StepOutput:
        """Compute what both models do."""
        loss = (model(data) - super().forward(data)).sum()
        self.bias.data.add_(1.0)
        return StepOutput(loss, 2)


class Remembering(nn.Linear):
    """Keeps for all objects of its class what depends on the batch's size, as masks are kept."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by what was kept."""
        ones = torch.ones(len(inputs), 1, device=inputs.device)
        return super().forward(inputs * self.kept.setdefault(len(inputs), ones))


def summed(model: nn.Module, data: Tensor) -> StepOutput:
    """Return the sum of the outputs."""
    return StepOutput(model(data).sum(), 2)


class Whole(TensorSplit):
    """One batch, whichever samples are asked for."""

    def load(self, *_: Any, **__: Any) -> Any:
        """Return it alone."""
        return iter([self.inputs])


def of_two(env: DistEnv, module: nn.Module, data: Any, step: Any) -> float | str:
    """Return the operations of a batch as two samples; or why there are none."""
    state = build(env, compose_config(*TOY, "parallelism=single"))
    batches = SimpleNamespace(split=Whole(data, data))
    dataset = replace(state.work.dataset, mean=None)
    state = replace(with_work(state, dataset=dataset, step_fn=step), batches=batches, module=module)
    state.sample = state.first()
    before = [one.clone() for one in (*module.parameters(), *module.buffers())]
    try:
        return 2 * flops_per_sample(state)
    except Exception as error:
        return str(error)
    finally:
        assert all(map(torch.equal, before, (*module.parameters(), *module.buffers())))
        assert all(one.grad is None for one in module.parameters())


def operations(env: DistEnv) -> list[Any]:
    """Return what is counted of each module and step, and whether a step's bias is the same."""
    step, fives, linear = Teaching(3, 4), torch.ones(5, 3), nn.Linear(3, 4)
    remembering = Remembering(3, 4)
    before = step.bias.clone()
    cases = [
        *((linear, fives, summed), (nn.Sequential(linear, nn.BatchNorm1d(4)), fives, summed)),
        (nn.Sequential(linear, nn.ReLU(), nn.Linear(4, 2)), fives, summed),
        *((CONV(8, 8, groups=groups), torch.ones(2, 8, 5, 5), summed) for groups in (1, 2, 8)),
        (remembering, fives, summed),
        (linear, fives, step),
        (nn.Embedding(3, 4), torch.ones(2, 1).long(), summed),
    ]
    counts = [of_two(env, *case) for case in cases]
    remembering(fives)  # as the run's next step does
    return [*counts, torch.equal(step.bias, before)]


def test_operations_are_counted() -> None:
    """As by hand; nothing of the model or the step changes, and what cannot be counted says why."""
    ((*counts, with_teacher, nothing, is_same),) = run_ranks(operations, 1)
    # Forward, and the weights' gradients; a second layer also has its inputs' gradients. With
    # groups each channel sees those of its group only.
    convolutions = [2 * 2 * (2 * 5 * 5) * 8 * 9 * 8 / groups for groups in (1, 2, 8)]
    layers = [2 * LINEAR, 2 * LINEAR, 2 * LINEAR + 3 * 2 * 5 * 4 * 2]
    assert counts == [*layers, *convolutions, 2 * LINEAR]
    assert (with_teacher, is_same) == (3 * LINEAR, True)  # whose weights are not trained
    assert nothing == "the step multiplies nothing"


def count(env: DistEnv, config: Config) -> float:
    """Return a sample's operations in a run."""
    state = build(env, config)
    state.sample = state.first()
    return flops_per_sample(state)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "keys"), first_of(MODES))
def test_a_sample_has_as_many_operations_in_every_mode(mode: str, keys: tuple[str, ...]) -> None:
    """Also in shards, in stages, and where activations are computed twice."""
    alone = [key.replace("convnet_mp", "convnet") for key in keys]
    (expected,) = run_ranks(count, 1, compose_config(*alone, "parallelism=single"))
    found = run_ranks(count, 2, compose_config(*keys, f"parallelism={mode}", world_size=2))
    assert found == [expected] * 2


def test_the_matmul_peak_is_that_of_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones only choose the size; two stages on one device count once."""
    calls = list[tuple[int, int]]()

    def timed(factor: Tensor, product: Tensor, *, count: int) -> float:
        assert torch.equal(product, factor @ factor)  # has been computed once before
        calls.append((len(factor), count))
        return count * (len(factor) / 1024) ** 3 * step_metrics.BUDGET_S / 4

    monkeypatch.setattr(step_metrics, "_timed", timed)
    peak = matmul_flops_per_s([CPU, CPU], torch.float32)
    assert calls == [(256, 1), (512, 1), (1024, 1), (1024, 4)]
    assert peak == pytest.approx(2 * 1024**3 * 4 / step_metrics.BUDGET_S)


def draw(module: object, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Add noise to a model's inputs, from every generator there is."""
    return (inputs[0] + 0.01 * (random.random() + np.random.rand() + torch.rand(())),)


def train(
    env: DistEnv, config: Config, after_s: float, slow: tuple[int, ...] = (), failing: int = -1
) -> tuple[Trace, Any]:
    """Train five steps, of which some are traced; return the trace, and what run.json keeps."""
    step_metrics.SETTLED_S = after_s
    profiler, state = SimpleNamespace(is_slow=False), build(env, config)
    profiler.step_done = lambda step: setattr(profiler, "is_slow", step + 1 in slow)
    state.profiler = profiler
    state.module.register_forward_pre_hook(draw)
    try_first_batch(state)
    if env.rank == failing:
        step_metrics.matmul_flops_per_s = None  # as on a full device, an error
    return run_loop(env, config, max_steps=5, state=state), state.measured


@pytest.mark.full
def test_measuring_changes_no_step() -> None:
    """No random number, no statistic; and no line with times has a step that was traced."""
    config = compose_config("model=convnet", *IMAGES, "train.log_every_steps=1", world_size=2)
    (measured, fields), _ = run_ranks(train, 2, config, 0.0, (2, 3))
    (undisturbed, nothing), _ = run_ranks(train, 2, config, 1e9)
    for line, other in zip(measured.lines, undisturbed.lines, strict=True):
        plain = {key: line[key] for key in line if "perf/" not in key}
        assert plain.items() <= other.items()
    assert torch.equal(measured.weights, undisturbed.weights)
    lines = [line for line in measured.lines if "train/loss" in line]
    assert [line["step"] for line in lines if "perf/step_time_ms" in line] == [1, 4, 5]
    assert all(MEMORY in line for line in lines)
    assert ["perf/mfu" in line for line in lines] == [False, False, False, True, True]
    rate = fields["flops_per_sample"] * lines[3]["perf/samples_per_s"]
    assert lines[3]["perf/mfu"] == pytest.approx(rate / fields["matmul_flops_per_s"])
    assert nothing["flops_per_sample"] is None is nothing["matmul_flops_per_s"]


@pytest.mark.parametrize(("mode", "failing"), [("ddp", 1), ("ps", -1)])
def test_what_one_rank_cannot_measure_nobody_has(mode: str, failing: int) -> None:
    """A server computes no gradients. The others do not wait, nor lack a part in the figure."""
    keys = (*TOY, f"parallelism={mode}", "train.log_every_steps=1")
    for trace, fields in run_ranks(train, 2, compose_config(*keys, world_size=2), 0.0, (), failing)[
        :1
    ]:
        assert trace.error == ""
        assert not any("perf/mfu" in line for line in trace.lines)
        assert fields["flops_per_sample"] is None is fields["matmul_flops_per_s"]


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Samples that loading processes give."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((10,), float(index)).sin(), torch.full((5,), float(index)).cos()


@pytest.mark.full
def test_measuring_leaves_the_loading_processes_alone() -> None:
    """They load for one epoch at a time, and it is measured amid one."""
    own = f"{{_target_:{__name__}.Waves}}"
    config = compose_config(
        *("model=toy", "dataset=torch_dataset", f"allowed_targets=[{__name__}]"),
        *(f"dataset.train={own}", f"dataset.eval={own}", "dataset.num_workers=1"),
        *("batch.global_size=4", "train.log_every_steps=1"),
        world_size=1,
    )
    ((trace, fields),) = run_ranks(train, 1, config, 0.0)
    assert not trace.error
    assert fields["flops_per_sample"] > 0
    assert [line["step"] for line in trace.lines if "train/loss" in line] == [1, 2, 3, 4, 5]
