"""Tries a loss, or a user's training step, on two samples and on the same samples twice.

A sum doubles. Most mistakes show up here, where the message can name them.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.splits import NUM_FIRST, MicroBatch
from ddp_runner.data.trees import shape_of, shapes_on_failure
from ddp_runner.errors import UserError
from ddp_runner.seeds import seed_all
from ddp_runner.train.state import TrainState, Work, forward
from ddp_runner.train.step import StepOutput, step_of

# Our sum for each mean of torch.nn.functional.
SUMS = {"cross_entropy": "cross_entropy", "nll_loss": "nll", "mse_loss": "mse"}

Kind = Literal["sum", "mean", "other"]


@dataclass(frozen=True)
class Trial:
    """The loss of two samples, and of the same samples twice."""

    once: float
    twice: float
    kind: Kind
    scalars: tuple[str, ...] = ()  # names of the scalars that the step returns in training

    @property
    def detail(self) -> str:
        """Both values, as a phrase."""
        return f"{NUM_FIRST} samples give {self.once:.4g}, the same samples twice {self.twice:.4g}"


@torch.no_grad()
def try_loss(state: TrainState, batch: MicroBatch) -> Trial:
    """Try the ordinary step, with a loss that inspects the model's outputs."""
    trials = list[Trial]()

    def probe(outputs: Any, targets: Any) -> Tensor:
        if isinstance(targets, Tensor):
            trials.append(_try_outputs(outputs, targets, state))
        return torch.zeros(())

    probing = partial(cast("partial[StepOutput]", state.work.step_fn), loss=probe)
    forward(replace(state.work, step_fn=probing), state.module, batch)
    return trials[0] if trials else try_step(state, batch)  # only tensors can be concatenated


@torch.enable_grad()
def _try_outputs(outputs: object, targets: Tensor, state: TrainState) -> Trial:
    """Compare the loss of a model's outputs with the loss of the same outputs twice."""
    config = state.work.config
    model, name = model_of(config), loss_of(config)
    outputs = _validated_outputs(outputs, targets, state.work)
    loss = cast("partial[StepOutput]", state.work.step_fn).keywords["loss"]
    outputs = outputs.detach().requires_grad_(outputs.is_floating_point() or outputs.is_complex())
    action = (
        f"{name} cannot take the outputs of {model}, {shape_of(outputs)}, with the targets of "
        f"dataset={state.work.dataset.name},"
    )
    with shapes_on_failure(action, targets, fix="choose a loss that fits"):
        once = loss(outputs, targets)
        # If the first dimension is not the batch, only the loss knows which dimension is.
        is_batch = len(outputs) == len(targets)
        twice = loss(torch.cat([outputs] * 2), torch.cat([targets] * 2)) if is_batch else None
    if not isinstance(once, Tensor) or once.numel() != 1:
        raise UserError(
            f"{name} returns {shape_of(once)}, not a single number",
            f"it must be the sum over the samples: {sum_form(config)}",
        )
    if not once.requires_grad:
        raise UserError(
            f"{name} returns a number that depends on no output of {model}",
            "compute it without no_grad, detach or item, from floating-point outputs",
        )
    if twice is None:
        return Trial(once.item(), 2 * once.item(), "sum")
    trial = _compared(once.item(), twice.item(), state, outputs.dtype)
    if trial.kind == "mean":
        (gradient,) = torch.autograd.grad(loss(outputs, targets).sum(), outputs, allow_unused=True)
        # The maximum over the samples does not change either, but depends on a single sample.
        if gradient is None or not gradient.reshape(len(gradient), -1).any(dim=1).all():
            return replace(trial, kind="other")
    return trial


def _validated_outputs(outputs: object, targets: Tensor, work: Work) -> Tensor:
    """Return a model's outputs, if they are a tensor with a score for each of the classes."""
    model, dataset = model_of(work.config), work.dataset
    if not isinstance(outputs, Tensor):
        keys = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, dict) else ""
        raise UserError(
            f"{model} returns a {type(outputs).__name__}{keys}, not a tensor",
            "write a train.step of your own, or return only the outputs",
        )
    classes, pixels = dataset.num_classes, targets.shape[1:]  # of a segmentation, else empty
    if classes and (outputs.ndim < 2 or outputs.shape[1] < classes or outputs.shape[2:] != pixels):
        raise UserError(
            f"{model} returns {tuple(outputs.shape)} for {len(targets)} samples of "
            f"dataset={dataset.name} with {classes} classes",
            f"return a score for each class: {(len(targets), classes, *pixels)}",
        )
    return outputs


@torch.enable_grad()
def try_step(state: TrainState, batch: MicroBatch) -> Trial:
    """Compare a training step's results for two samples, with another seed, and for them twice."""
    config, name, steps = state.work.config, step_of(state.work.config), list[StepOutput]()
    double_batch = state.first([*range(NUM_FIRST)] * 2)
    for data, seed in ((batch, 0), (batch, 1), (double_batch, 0)):
        seed_all(seed)
        steps.append(step := forward(state.work, state.module, data))
        _validate_step(step, name)
    (count, _, count_twice) = (float(step.count) for step in steps)
    if config.batch.count == "samples" and count != NUM_FIRST:
        raise UserError(
            f"{name} returns count={count:g} for {NUM_FIRST} samples",
            "write batch.count=tokens if it counts something else, or return the number of samples",
        )
    if count_twice != 2 * count:
        raise UserError(
            f"{name} returns count={count:g} for {NUM_FIRST} samples and {count_twice:g} for the "
            "same samples twice",
            "return a count that adds up",
        )
    once, other_seed, twice = (step.loss_sum.item() for step in steps)
    trial = _compared(once, twice, state, step.loss_sum.dtype)
    seed_all(0)
    state.module.train()
    with torch.no_grad():
        trained = forward(state.work, state.module, batch)
    # A loss that draws random numbers cannot be compared.
    kind = trial.kind if once == other_seed else "sum"
    return replace(trial, kind=kind, scalars=tuple(trained.scalars))


def _validate_step(step: object, name: str) -> None:
    if not isinstance(step, StepOutput):
        raise UserError(
            f"{name} returns a {type(step).__name__}",
            "return a ddp_runner.StepOutput(loss_sum, count)",
        )
    loss = step.loss_sum
    if not isinstance(loss, Tensor) or loss.ndim:
        raise UserError(
            f"{name} returns {shape_of(loss)} as loss_sum",
            "return a tensor without dims, the sum over the samples or tokens",
        )
    for key, value in step.scalars.items():
        if not isinstance(value, Tensor) or value.numel() != 1 or key == "loss":
            raise UserError(
                f"{name} returns {shape_of(value)} as the scalar {key}",
                "return a tensor of a single number, under another name than loss",
            )
    if not loss.requires_grad:
        raise UserError(
            f"{name} returns a loss_sum that depends on no parameter in evaluation mode",
            "compute it with the step's model, without no_grad, detach or item, and put parts that "
            "need training mode between model.train() and model.eval(): see docs/your_own_step.md",
        )


def _compared(once: float, twice: float, state: TrainState, dtype: torch.dtype) -> Trial:
    """Return the kind of a loss from its two values; training will reject NaN and infinity."""
    is_exact = state.work.config.train.precision == "fp32" and dtype.itemsize > 2
    # Far above rounding, as any smaller loss is, and far below the factor of 2 of a sum and a mean.
    near = partial(math.isclose, twice, rel_tol=1e-3 if is_exact else 5e-2, abs_tol=1e-6)
    kind: Kind = "mean" if near(once) else "other"
    if near(2 * once) or not (math.isfinite(once) and math.isfinite(twice)):
        kind = "sum"
    return Trial(once, twice, kind)


def model_of(config: RunConfig) -> str:
    """Return the name of the model for messages."""
    return f"model={config.model.get('name')}"


def loss_of(config: RunConfig) -> str:
    """Return the name of the loss for messages."""
    return f"model.loss={config.model['loss']}"


def sum_form(config: RunConfig) -> str:
    """Return the fix for a loss that is not a sum."""
    if (name := SUMS.get(str(config.model["loss"]).rpartition(".")[2])) is not None:
        return f"write model.loss=ddp_runner.train.losses.{name}"
    return "return the sum instead, as torch's losses do with reduction='sum'"
