"""State beside the model's weights: of a training step, and in buffers that training changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from train_states import TOY, Trace, build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.buffers import find_changing
from ddp_runner.train.step import StepOutput

BASE = (
    *TOY,
    "dataset.num_samples=24",
    "train.epochs=2",
    "train.log_every_steps=1",
    "checkpoint.every_steps=1",
    f"allowed_targets=[{__name__}]",
)


class Normalising(nn.Module):
    """A step that keeps a running mean of its targets, and a slow copy of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.teacher = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return squared errors of targets that are centred by all batches so far."""
        inputs, targets = batch
        outputs = model(inputs)
        if torch.is_grad_enabled() and model.training:
            self.mean = self.mean.lerp(targets.mean(dim=0), 0.5)  # assigned anew
            self.teacher.data.lerp_(self.mean, 0.1)
        loss = F.mse_loss(outputs - self.teacher, targets - self.mean, reduction="sum")
        return StepOutput(loss, len(targets), outputs=outputs, targets=targets)


class Counted(nn.Module):
    """A loss that grows with the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed squared errors, weighted."""
        if outputs.requires_grad:
            self.seen += targets.sum() / 100
        return F.mse_loss(outputs, targets, reduction="sum") * (1 + self.seen)


class Queue:
    """A step without a module: a memory of outputs, with a state of its own."""

    def __init__(self) -> None:
        self.last = 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the memory."""
        return {"last": self.last}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take a memory."""
        self.last = state["last"]

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return errors that depend on how many batches there were."""
        inputs, targets = batch
        outputs = model(inputs)
        if model.training:
            self.last = self.last / 2 + 1.0
        loss = F.mse_loss(outputs, targets, reduction="sum") * (1 + self.last)
        return StepOutput(loss, len(targets), outputs=outputs, targets=targets)


class Codebook(nn.Module):
    """A model that reads, in training, what it has written into a buffer before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 5), nn.BatchNorm1d(5)
        self.register_buffer("code", torch.zeros(5))
        self.register_buffer("scale", torch.ones(()))  # nobody changes it

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs = self.norm(self.linear(inputs)) * self.scale + self.code
        if self.training:
            self.code.lerp_(outputs.detach().mean(dim=0), 0.3)
        return outputs


class Recorded(nn.Module):
    """A model whose buffer has the size of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 5)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.linear(inputs)
        self.last = outputs.detach().sum(dim=1)
        return outputs


class Teacher(nn.Module):
    """A step whose teacher takes BatchNorm's statistics from the model, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, model: Any, batch: Any) -> StepOutput:
        """Return errors beside the teacher's targets."""
        inputs, targets = batch
        outputs = model(inputs)
        bare = getattr(model, "module", model)
        if model.training:
            self.norm.running_mean.copy_(bare.norm.running_mean)
            self.norm.running_var.copy_(bare.norm.running_var)
        with torch.no_grad():
            wanted = self.norm.eval()(targets)
        return StepOutput(F.mse_loss(outputs, wanted, reduction="sum"), len(targets))


CASES = {
    "a teacher with BatchNorm": (
        f"train.step={__name__}.Teacher",
        f"model._target_={__name__}.Codebook",
    ),
    "a step that is a module": (f"train.step={__name__}.Normalising",),
    "a loss that is a module": (f"model.loss={__name__}.Counted",),
    "a step with a state": (f"train.step={__name__}.Queue",),
    "a codebook": (f"model._target_={__name__}.Codebook",),
}
MODES = {
    "ddp": ("parallelism=ddp", 2),
    "single": ("parallelism=single", 1),
    "dp": ("parallelism=dp", 1),
    "fsdp": ("parallelism=fsdp", 2),
    "hsdp": ("parallelism=hsdp", 4),
    "ps": ("parallelism=ps", 3),
}


def config_of(case: str, mode: str, *keys: str) -> Config:
    """Return the config of a case in a mode."""
    parallelism, world_size = MODES[mode]
    return compose_config(*BASE, *CASES[case], parallelism, *keys, world_size=world_size)


def loop(
    env: DistEnv, config: Config, folder: Path | None = None, stop_after: int | None = None
) -> Trace:
    """Run from the newest checkpoint to the end or a stop."""
    state = build(env, config)
    find_changing(state)
    return run_loop(env, config, max_steps=None, folder=folder, stop_after=stop_after, state=state)


def losses(*traces: Trace) -> list[float]:
    """Return the losses of the steps."""
    return [loss for trace in traces for loss in trace.losses]


WAYS = {
    f"{case}, {mode}": (case, mode)
    for case in CASES
    for mode in MODES
    # A server sends a model's buffers alone, and keeps no state of a step.
    if mode != "ps" or case == "a codebook"
}


def ways() -> list[Any]:
    """Return the ways: by default one; a mode that behaves like another is `slow`.

    On CPUs dp is one process; hsdp shards as fsdp does, over a mesh of four.
    """
    alike = {"dp", "hsdp"}
    return [
        pytest.param(
            name,
            marks=[
                *([] if name == "a codebook, ddp" else [pytest.mark.full]),
                *([pytest.mark.slow] if mode in alike else []),
            ],
        )
        for name, (_, mode) in WAYS.items()
    ]


@pytest.mark.parametrize("way", ways())
def test_a_state_that_training_changes_is_the_same_whatever_interrupts_it(
    way: str, tmp_path: Path
) -> None:
    """Three steps and three more after a resume, and evaluations or none: bit for bit."""
    case, mode = WAYS[way]
    world_size = MODES[mode][1]
    whole = run_ranks(loop, world_size, config_of(case, mode, "train.eval_every_epochs=0"))[0]
    assert len(set(whole.losses)) == 6
    for every in (1, 2):
        keys = (f"train.eval_every_steps={every}",)
        (evaluated, *_) = run_ranks(loop, world_size, config_of(case, mode, *keys))
        assert losses(evaluated) == losses(whole), every
        assert torch.equal(evaluated.weights, whole.weights), every
    stop = 3 - (world_size > 1 and mode != "ps")
    config = config_of(case, mode, "train.eval_every_epochs=0")
    first = run_ranks(stopping, world_size, config, tmp_path, stop)[0]
    rest = run_ranks(loop, world_size, config, tmp_path)[0]
    assert len(rest.losses) == 3
    assert losses(first, rest) == losses(whole)
    assert torch.equal(rest.weights, whole.weights)


def stopping(env: DistEnv, config: Config, folder: Path, stop: int) -> Trace:
    """Run until rank 0 or the last rank of the loop asks to stop."""
    state = build(env, config)
    find_changing(state)
    is_alone = state.work.env.world_size == 1
    return run_loop(
        env,
        config,
        max_steps=3 if is_alone else None,
        folder=folder,
        stop_after=None if is_alone else stop,
        state=state,
    )


def changing(env: DistEnv, configs: list[Config]) -> list[set[str]]:
    """Return the names of the buffers that are found to change, and check that nothing has."""
    found = []
    for config in configs:
        state = build(env, config)
        before = {name: one.clone() for name, one in state.module.named_buffers()}
        find_changing(state)
        assert all(torch.equal(before[name], one) for name, one in state.module.named_buffers())
        found.append({name for _, name in state.changing})
    return found


def test_only_buffers_that_training_changes_are_sent() -> None:
    """Not BatchNorm's statistics, nor a constant."""
    configs = [config_of(case, "ddp") for case in ("a codebook", "a step that is a module")]
    expected = [{"code"}, {"mean", "teacher"}]
    assert run_ranks(changing, 2, configs) == [expected, expected]


def rejection(env: DistEnv, config: Config) -> str:
    """Return what is said of the buffers."""
    with pytest.raises(UserError) as caught:
        find_changing(build(env, config))
    return str(caught.value)


def test_a_buffer_of_the_size_of_the_batch_is_one_line() -> None:
    """Ranks could not send it, nor a resume load it."""
    config = compose_config(*BASE, f"model._target_={__name__}.Recorded", world_size=2)
    for answer in run_ranks(rejection, 2, config):
        assert answer.startswith("the buffer model.last is (2,) of float32 for 2 samples and (3,)")


def in_pairs(model: nn.Module, batch: Any) -> StepOutput:
    """Return the loss of a batch in two halves, as a contrastive step needs them."""
    inputs, targets = batch
    if len(inputs) % 2:
        raise ValueError("an odd batch")
    outputs = model(inputs)
    return StepOutput(F.mse_loss(outputs, targets, reduction="sum"), len(targets))


def test_a_step_of_even_batches_sends_no_buffer_that_stays() -> None:
    """Two samples have shown what changes; only the third one fails."""
    config = config_of("a codebook", "ddp", f"train.step={__name__}.in_pairs")
    assert run_ranks(changing, 2, [config]) == [[{"code"}]] * 2
