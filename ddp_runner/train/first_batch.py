"""What runs before the first step: a trial of two samples, and the rehearsal of a resumed run.

Most mistakes in a user's model or loss show up here, where the message can name them. Every rank
tries the same two samples and gets the same result, so the trial needs no collective.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.batches import MicroBatch
from ddp_runner.errors import UserError, typed
from ddp_runner.train.loop import forward
from ddp_runner.train.state import TrainState

NUM_SAMPLES = 2
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

    @property
    def detail(self) -> str:
        """Both values, as a phrase."""
        return f"{NUM_SAMPLES} samples give {self.once:.4g}, given twice {self.twice:.4g}"


def try_first_batch(state: TrainState) -> Trial:
    """Evaluate two training samples and their loss on this rank, and leave the state as it was.

    Raises:
        UserError: the model cannot take the samples, or the loss cannot take the outputs. The
            message has the exception's type and text; the log has its traceback.
    """
    setup, trials = state.setup, list[Trial]()
    batch = _first_samples(state, NUM_SAMPLES)

    def probe(outputs: Tensor, targets: Tensor) -> Tensor:
        trials.append(_try_outputs(outputs, targets, state))
        return targets.new_zeros(())

    try:
        with _restored_after(state), torch.no_grad():
            forward(replace(state, setup=replace(setup, loss_fn=probe)), state.module, batch)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{_model(setup.config)} cannot take dataset={setup.dataset.name}, whose samples are "
            f"{_shape(batch.inputs)}: {typed(error)}; choose a dataset or a model that fits"
        ) from error
    return trials[0]


def warnings_of(trial: Trial, state: TrainState) -> list[str]:
    """Return warnings about the loss and the batch size, a sentence each.

    Raises:
        UserError: the loss is a mean over the samples. Its gradients would be too small by the
            batch size.
    """
    config, warnings = state.setup.config, []
    if trial.kind == "mean":
        raise UserError(
            f"{_loss(config)} returns a mean over the samples, not a sum ({trial.detail}); "
            f"{_sum_form(config)}"
        )
    if trial.kind == "other":
        warnings.append(
            f"{_loss(config)} is not a sum over the samples ({trial.detail}), so the steps depend "
            "on how a batch is split into ranks and micro-batches"
        )
    global_size, num_samples = state.setup.batches.global_size, len(state.setup.batches.split)
    if global_size > num_samples:
        warnings.append(
            f"batch.global_size ({global_size}) is larger than the training set: "
            f"1 step an epoch of {num_samples:,} samples"
        )
    return warnings


def rehearse(state: TrainState) -> None:
    """Run a backward whose gradients are dropped. Collective: every rank must call.

    DDP rebuilds its buckets after its first backward. A gradient's place in its bucket decides in
    which order three or more ranks are added, and so how the sum is rounded. A resumed run must
    therefore not take its first step with the initial buckets. Call this before loading the state,
    since it changes random numbers and buffers.
    """
    if state.model is state.module or state.setup.env.world_size < 3:
        return  # the mode wraps nothing, or the sum has only one order
    state.model.train()
    # The real batch size, since torch.compile compiles for it.
    batch = _first_samples(state, state.setup.batches.micro_size)
    loss, _ = forward(state, state.model, batch)
    loss.backward()  # the next step sets these gradients to None


def _first_samples(state: TrainState, count: int) -> MicroBatch:
    """Return the first training samples, the last one repeated if there are too few."""
    split = state.setup.batches.split
    indices = torch.arange(count, device=split.inputs.device).clamp(max=len(split) - 1)
    return MicroBatch(split.inputs.index_select(0, indices), split.targets.index_select(0, indices))


@contextmanager
def _restored_after(state: TrainState) -> Iterator[None]:
    """Evaluate in the block, then restore random numbers, buffers and the model's mode."""
    module, was_training = state.module, state.module.training
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    cuda = [device for device in state.setup.devices if device.type == "cuda"]
    module.eval()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        module.train(was_training)
        for buffer, value in buffers:
            buffer.copy_(value)


@torch.enable_grad()
def _try_outputs(outputs: object, targets: Tensor, state: TrainState) -> Trial:
    """Compare the loss and its gradient with those of the same samples given twice."""
    dataset, model = state.setup.dataset, _model(state.setup.config)
    if not isinstance(outputs, Tensor):
        keys = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, dict) else ""
        raise UserError(
            f"{model} returns a {type(outputs).__name__}{keys}, not a tensor; return only the "
            "outputs"
        )
    classes = dataset.num_classes
    if classes and (outputs.ndim != 2 or outputs.shape[1] < classes):
        raise UserError(
            f"{model} returns {tuple(outputs.shape)} for {len(targets)} samples of "
            f"dataset={dataset.name} with {classes} classes; return a score for each class: "
            f"({len(targets)}, {classes})"
        )
    once, gradient = _loss_and_gradient(outputs, targets, state)
    if len(outputs) != len(targets):  # only the loss knows which dimension is the batch
        return Trial(once, 2 * once, "sum")
    twice, gradient_twice = _loss_and_gradient(
        torch.cat([outputs, outputs]), torch.cat([targets, targets]), state
    )
    tolerance = LOW_PRECISION_TOLERANCE
    if state.setup.config.train.precision == "fp32":
        tolerance = TOLERANCES.get(outputs.dtype, tolerance)
    near = partial(math.isclose, twice, rel_tol=tolerance, abs_tol=NEGLIGIBLE)
    largest = gradient.abs().reshape(len(gradient), -1).amax(dim=1)  # of each sample
    off_half = (gradient_twice[: len(gradient)] - gradient / 2).abs().max()
    # The loss of the worst sample does not change either, but depends on that sample only.
    is_halved = bool(largest.all() and off_half <= tolerance * largest.max())
    if near(2 * once) or not (math.isfinite(once) and math.isfinite(twice)):
        kind = "sum"  # the training loop reports a loss that is not finite
    elif near(once) and is_halved:
        kind = "mean"
    else:
        kind = "other"
    return Trial(once, twice, kind)


def _loss_and_gradient(outputs: Tensor, targets: Tensor, state: TrainState) -> tuple[float, Tensor]:
    """Return the loss and its gradient with respect to the outputs, of the same shape."""
    setup, config = state.setup, state.setup.config
    outputs = outputs.detach().requires_grad_(outputs.is_floating_point())
    try:
        loss = setup.loss_fn(outputs, targets)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{_loss(config)} cannot take the outputs of {_model(config)}, {_shape(outputs)}, with "
            f"the targets of dataset={setup.dataset.name}, {_shape(targets)}: {typed(error)}"
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = _shape(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UserError(
            f"{_loss(config)} returns {what}, not a single number; it must be the sum over the "
            f"samples: {_sum_form(config)}"
        )
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), outputs, allow_unused=True)
    return loss.item(), torch.zeros_like(outputs) if gradient is None else gradient


def _model(config: RunConfig) -> str:
    return f"model={config.model.get('name')}"


def _loss(config: RunConfig) -> str:
    return f"model.loss={config.model['loss']}"


def _sum_form(config: RunConfig) -> str:
    """Return the fix for a loss that is not a sum."""
    if (own := SUMS.get(str(config.model["loss"]).rpartition(".")[2])) is not None:
        return f"write model.loss=ddp_runner.train.losses.{own}"
    return "return the sum instead, as torch's losses do with reduction='sum'"


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
