"""Tries a loss, or a user's training step, on two samples and on the same samples given twice.

A sum doubles. Most mistakes show up here, where the message can name them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.splits import NUM_FIRST, MicroBatch
from ddp_runner.data.trees import shape_of, taking
from ddp_runner.errors import UserError
from ddp_runner.seeds import seed_all
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import Step, supervised
from ddp_runner.train.work import forward

# Far above rounding, and far below the factor of 2 between a sum and a mean.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2
NEGLIGIBLE = 1e-6  # a smaller loss is only rounding
SUMS = {"cross_entropy": "cross_entropy", "nll_loss": "nll", "mse_loss": "mse"}


@dataclass(frozen=True)
class Trial:
    """The loss of two samples, and of the same samples given twice."""

    once: float
    twice: float
    kind: str  # sum, mean or other
    scalars: tuple[str, ...] = ()  # the names of those that the step returns in training

    @property
    def detail(self) -> str:
        """Both values, as a phrase."""
        return f"{NUM_FIRST} samples give {self.once:.4g}, given twice {self.twice:.4g}"


@torch.no_grad()
def try_loss(state: TrainState, batch: MicroBatch) -> Trial:
    """Try the ordinary step with a loss that looks at the model's outputs."""
    trials = list[Trial]()

    def probe(outputs: Any, targets: Any) -> Tensor:
        if isinstance(targets, Tensor):
            trials.append(_try_outputs(outputs, targets, state))
        return torch.zeros(())

    step = cast("partial[Step]", state.work.step_fn)
    probing = partial(step.func, **(step.keywords | {"loss": probe}))
    forward(replace(state.work, step_fn=probing), state.module, batch)
    return trials[0] if trials else try_step(state, batch)  # only a tensor can be given twice


@torch.enable_grad()
def try_step(state: TrainState, batch: MicroBatch) -> Trial:
    """Compare what a user's step returns for samples once, once more, and given twice."""
    name = step_of(state.work.config)
    twice_batch = state.first([*range(NUM_FIRST)] * 2)
    steps = []
    for data, seed in ((batch, 0), (batch, 1), (twice_batch, 0)):
        seed_all(seed)
        step = forward(state.work, state.module, data)
        _validate_step(step, name)
        if not step.loss_sum.requires_grad:
            raise UserError(
                f"{name} returns a loss_sum that depends on no parameter in evaluation mode; "
                "compute it with the model that the step gets, without no_grad, detach or item, "
                "and what only training mode computes between model.train() and model.eval(): see "
                "docs/your_own_step.md"
            )
        steps.append((step, step.loss_sum.item(), float(step.count)))
    (step, once, count), (_, again, _), (_, twice, count_twice) = steps
    if state.work.config.batch.count == "samples" and count != NUM_FIRST:
        raise UserError(
            f"{name} returns count={count:g} for {NUM_FIRST} samples; write batch.count=tokens "
            "if it counts something else, or return the number of samples"
        )
    if count_twice != 2 * count:
        raise UserError(
            f"{name} returns count={count:g} for {NUM_FIRST} samples and {count_twice:g} for the "
            "same given twice; a count must add up"
        )
    kind = _kind(once, twice, tolerance=_tolerance(state, step.loss_sum.dtype))
    if once != again:  # it draws random numbers, and cannot be compared
        kind = "sum"
    seed_all(0)
    state.module.train()
    with torch.no_grad():
        trained = forward(state.work, state.module, batch)
    return Trial(once, twice, kind, scalars=tuple(trained.scalars))


def _validate_step(step: object, name: str) -> None:
    if not isinstance(step, Step):
        raise UserError(
            f"{name} returns a {type(step).__name__}; return a "
            "ddp_runner.train.step.Step(loss_sum, count)"
        )
    loss = step.loss_sum
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.ndim:
        raise UserError(
            f"{name} returns {shape_of(loss)} as loss_sum; return a tensor without dims, the sum "
            "over the samples or tokens"
        )
    for key, value in step.scalars.items():
        if not isinstance(value, Tensor) or value.numel() != 1 or key == "loss":
            raise UserError(
                f"{name} returns {shape_of(value)} as the scalar {key}; return a tensor of one "
                "number, and not under the name loss"
            )


@torch.enable_grad()
def _try_outputs(outputs: object, targets: Tensor, state: TrainState) -> Trial:
    """Compare the loss and its gradient with those of the same samples given twice."""
    dataset, model = state.work.dataset, model_of(state.work.config)
    if not isinstance(outputs, Tensor):
        keys = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, dict) else ""
        raise UserError(
            f"{model} returns a {type(outputs).__name__}{keys}, not a tensor; write a "
            "train.step of your own, or return only the outputs"
        )
    classes, places = dataset.num_classes, targets.shape[1:]  # of a segmentation: the pixels
    if classes and (outputs.ndim < 2 or outputs.shape[1] < classes or outputs.shape[2:] != places):
        raise UserError(
            f"{model} returns {tuple(outputs.shape)} for {len(targets)} samples of "
            f"dataset={dataset.name} with {classes} classes; return a score for each class: "
            f"{(len(targets), classes, *places)}"
        )
    once, gradient = _loss_and_gradient(outputs, targets, state)
    if len(outputs) != len(targets):  # only the loss knows which dimension is the batch
        return Trial(once, 2 * once, "sum")
    twice, gradient_twice = _loss_and_gradient(
        torch.cat([outputs, outputs]), torch.cat([targets, targets]), state
    )
    tolerance = _tolerance(state, outputs.dtype)
    kind = _kind(once, twice, tolerance=tolerance)
    largest = gradient.abs().reshape(len(gradient), -1).amax(dim=1)  # of each sample
    off_half = (gradient_twice[: len(gradient)] - gradient / 2).abs().max()
    # The loss of the worst sample does not change either, but depends on that sample only.
    is_halved = bool(largest.all() and off_half <= tolerance * largest.max())
    return Trial(once, twice, "other" if kind == "mean" and not is_halved else kind)


def _tolerance(state: TrainState, dtype: torch.dtype) -> float:
    is_low = state.work.config.train.precision != "fp32"
    return LOW_PRECISION_TOLERANCE if is_low else TOLERANCES.get(dtype, LOW_PRECISION_TOLERANCE)


def _kind(once: float, twice: float, *, tolerance: float) -> str:
    """Return of which kind a loss is that has two values; one that is not finite fails later."""
    near = partial(math.isclose, twice, rel_tol=tolerance, abs_tol=NEGLIGIBLE)
    if near(2 * once) or not (math.isfinite(once) and math.isfinite(twice)):
        return "sum"
    return "mean" if near(once) else "other"


def _loss_and_gradient(outputs: Tensor, targets: Tensor, state: TrainState) -> tuple[float, Tensor]:
    """Return the loss and its gradient with respect to the outputs, of the same shape."""
    work, config = state.work, state.work.config
    step = cast("partial[Step]", work.step_fn)
    outputs = outputs.detach().requires_grad_(outputs.is_floating_point() or outputs.is_complex())
    what = (
        f"{loss_of(config)} cannot take the outputs of {model_of(config)}, "
        f"{shape_of(outputs)}, with the targets of dataset={work.dataset.name},"
    )
    with taking(what, targets, fix="choose a loss that fits"):
        loss = step.keywords["loss"](outputs, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserError(
            f"{loss_of(config)} returns {shape_of(loss)}, not a single number; it must be the sum "
            f"over the samples: {sum_form(config)}"
        )
    if not loss.requires_grad:
        raise UserError(
            f"{loss_of(config)} returns a number that depends on no output of "
            f"{model_of(config)}; compute it without no_grad, detach or item, from outputs that "
            "are no integers"
        )
    (gradient,) = torch.autograd.grad(loss.sum(), outputs, allow_unused=True)
    return loss.item(), torch.zeros_like(outputs) if gradient is None else gradient


def is_ordinary(state: TrainState) -> bool:
    """Return whether the run takes the ordinary training step."""
    step = state.work.step_fn
    return isinstance(step, partial) and step.func is supervised


def model_of(config: RunConfig) -> str:
    """Return how a message names the model."""
    return f"model={config.model.get('name')}"


def loss_of(config: RunConfig) -> str:
    """Return how a message names the loss."""
    return f"model.loss={config.model['loss']}"


def step_of(config: RunConfig) -> str:
    """Return how a message names the training step."""
    named = config.train.step
    return f"train.step={named['_target_'] if isinstance(named, Mapping) else named}"


def sum_form(config: RunConfig) -> str:
    """Return the fix for a loss that is not a sum."""
    if (own := SUMS.get(str(config.model["loss"]).rpartition(".")[2])) is not None:
        return f"write model.loss=ddp_runner.train.losses.{own}"
    return "return the sum instead, as torch's losses do with reduction='sum'"
