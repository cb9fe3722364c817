"""Tries two samples before training: do model, loss and data fit together, is the loss a sum?

Most mistakes in a model or loss of one's own show here, where they can be named. Every rank tries
the same two samples on its own and comes to the same answer, so that no collective is needed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_runner.config.schema import Config
from ddp_runner.data.batches import MicroBatch
from ddp_runner.errors import UserError
from ddp_runner.train.loop import forward
from ddp_runner.train.state import TrainState

NUM_SAMPLES = 2
# Far above rounding and far below the factor of 2 that tells a sum from a mean.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2
NEGLIGIBLE = 1e-6  # a smaller loss is all rounding
SUMS = {"cross_entropy": "cross_entropy", "nll_loss": "nll", "mse_loss": "mse"}


@dataclass(frozen=True)
class Trial:
    """What the loss does when the same samples come twice over."""

    once: float
    twice: float
    kind: str  # sum, mean or neither

    @property
    def detail(self) -> str:
        """Both values."""
        return f"{NUM_SAMPLES} samples give {self.once:.4g}, the same twice over {self.twice:.4g}"


def try_first_batch(state: TrainState, config: Config) -> Trial:
    """Evaluate two training samples and their loss on this rank; no collective, leaves no trace.

    Raises:
        UserError: the model cannot take the samples, or the loss the outputs; the sentence has the
            exception's type and text, and the log its traceback.
    """
    split, found = state.setup.batches.split, list[Trial]()
    few = torch.arange(NUM_SAMPLES, device=split.inputs.device).clamp(max=len(split) - 1)
    batch = MicroBatch(split.inputs.index_select(0, few), split.targets.index_select(0, few))

    def probe(outputs: Tensor, targets: Tensor) -> Tensor:
        _validate_outputs(outputs, targets, state, config)
        found.append(_measured(outputs, targets, state, config))
        return targets.new_zeros(())

    try:
        with _leaving_no_trace(state), torch.no_grad():
            forward(replace(state, setup=replace(state.setup, loss_fn=probe)), state.module, batch)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{_model(config)} cannot take dataset={state.setup.dataset.name}, whose samples are "
            f"{_shape(batch.inputs)}: {_told(error)}; choose a dataset or a model that fits"
        ) from error
    return found[0]


def refuse_mean(trial: Trial, config: Config) -> None:
    """Refuse a loss that would train with gradients that are too small by the batch's size.

    Raises:
        UserError: the loss is a mean over the samples.
    """
    if trial.kind == "mean":
        raise UserError(
            f"{_loss(config)} returns a mean over the samples, not a sum ({trial.detail}); "
            f"{_sum_form(config)}"
        )


def warnings_of(trial: Trial, state: TrainState, config: Config) -> list[str]:
    """Return what a user should know before the first step."""
    found, num_samples = [], len(state.setup.batches.split)
    if trial.kind == "neither":
        found.append(
            f"{_loss(config)} is not a sum over the samples ({trial.detail}), so that the steps "
            "depend on how a batch is cut into ranks and micro-batches"
        )
    global_size = state.setup.batches.global_size
    if global_size > num_samples:
        found.append(
            f"batch.global_size ({global_size}) is larger than the training set: "
            f"1 step an epoch of {num_samples:,} samples"
        )
    return found


@contextmanager
def _leaving_no_trace(state: TrainState) -> Iterator[None]:
    """Evaluate in the block: random numbers, buffers and the model's mode are then as before."""
    module = state.module
    was_training, buffers = module.training, [(one, one.clone()) for one in module.buffers()]
    cuda = [device for device in state.setup.devices if device.type == "cuda"]
    module.eval()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        module.train(was_training)
        for buffer, value in buffers:
            buffer.copy_(value)


def _validate_outputs(outputs: object, targets: Tensor, state: TrainState, config: Config) -> None:
    dataset = state.setup.dataset
    if not isinstance(outputs, Tensor):
        what = type(outputs).__name__
        if isinstance(outputs, dict):
            what += f" of {', '.join(map(str, outputs))}"
        raise UserError(f"{_model(config)} gives a {what}, not a tensor; return the outputs alone")
    classes = dataset.num_classes
    if classes and (outputs.ndim != 2 or outputs.shape[1] < classes):
        raise UserError(
            f"{_model(config)} gives {tuple(outputs.shape)} for {len(targets)} samples of "
            f"dataset={dataset.name} with {classes} classes; it must give a score for each class: "
            f"({len(targets)}, {classes})"
        )


@torch.enable_grad()
def _measured(outputs: Tensor, targets: Tensor, state: TrainState, config: Config) -> Trial:
    """Compare the loss, and its gradient by the outputs, with those of the samples twice over."""
    once, slope = _loss_and_slope(outputs, targets, state, config)
    if len(outputs) != len(targets):  # no batch comes first, and the loss alone knows which
        return Trial(once, 2 * once, "sum")
    twice, other_slope = _loss_and_slope(
        torch.cat([outputs, outputs]), torch.cat([targets, targets]), state, config
    )
    is_low = state.setup.config.precision != "fp32"
    tolerance = TOLERANCES.get(outputs.dtype, LOW_PRECISION_TOLERANCE)
    tolerance = max(tolerance, LOW_PRECISION_TOLERANCE * is_low)

    def near(one: float, other: float) -> bool:
        return abs(one - other) <= tolerance * max(abs(one), abs(other)) + NEGLIGIBLE

    steepest = slope.abs().reshape(len(slope), -1).amax(dim=1)  # of each sample
    off_half = (other_slope[: len(slope)] - slope / 2).abs().max()
    # The worst sample's loss, too, stays as it is, but depends on no other sample.
    halves = bool(steepest.all() and off_half <= tolerance * steepest.max())
    if near(twice, 2 * once) or not (math.isfinite(once) and math.isfinite(twice)):
        kind = "sum"  # what is not finite the training loop will name
    elif near(twice, once) and halves:
        kind = "mean"
    else:
        kind = "neither"
    return Trial(once, twice, kind)


def _loss_and_slope(
    outputs: Tensor, targets: Tensor, state: TrainState, config: Config
) -> tuple[float, Tensor]:
    """Return the loss and its gradient by the outputs, of their shape."""
    outputs = outputs.detach().requires_grad_(outputs.is_floating_point())
    try:
        loss = state.setup.loss_fn(outputs, targets)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{_loss(config)} cannot take the outputs of {_model(config)}, {_shape(outputs)}, with "
            f"the targets of dataset={state.setup.dataset.name}, {_shape(targets)}: {_told(error)}"
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = _shape(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UserError(
            f"{_loss(config)} returns {what}, not one number, the sum over the samples; "
            f"{_sum_form(config)}"
        )
    slope = None
    if loss.requires_grad:
        (slope,) = torch.autograd.grad(loss.sum(), outputs, allow_unused=True)
    return loss.item(), torch.zeros_like(outputs) if slope is None else slope


def _model(config: Config) -> str:
    return f"model={config.model.get('name')}"


def _loss(config: Config) -> str:
    return f"model.loss={config.model['loss']}"


def _sum_form(config: Config) -> str:
    """Return what to write in place of a loss that is no sum."""
    ours = SUMS.get(str(config.model["loss"]).rpartition(".")[2])
    if ours is not None:
        return f"write model.loss=ddp_runner.train.losses.{ours}"
    return "let it return the sum, as torch's losses do with reduction='sum'"


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
