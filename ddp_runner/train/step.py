"""The training step: from model and batch to loss. ``train.step`` names it; users write their own.

The ordinary step, ``supervised``, is the default and the example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.splits import IGNORED, validate_classes
from ddp_runner.data.trees import first_tensor, shape_of, to_device
from ddp_runner.errors import UserError


@dataclass(frozen=True)
class StepOutput:
    """The result of a training step for a batch.

    The runner divides sums by the count over all micro-batches and ranks, so that every split of a
    global batch takes the same step. Evaluation uses the same function, without gradients.
    """

    loss_sum: Tensor  # a scalar: the loss, summed over the samples or tokens
    count: int | Tensor  # samples, or tokens with batch.count=tokens
    outputs: Any = None  # for the metrics; None: no metrics of outputs
    targets: Any = None  # for the metrics
    # More sums over the samples or tokens, logged as means: train/NAME and eval/NAME.
    scalars: Mapping[str, Tensor] = field(default_factory=dict)


StepFunction = Callable[[nn.Module, Any], StepOutput]


def supervised(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor],
    targets: str | None = None,
    count: str = "samples",
) -> StepOutput:
    """Return the loss of the model's outputs: the ordinary training step.

    Args:
        model: called with the inputs: a tensor, the items of a tuple, or a mapping as keywords.
        batch: the pair (inputs, targets), or a mapping.
        loss: (outputs, targets) -> the sum over the samples, a scalar: the key model.loss.
        targets: the key of the targets in a mapping; the model gets all other keys.
        count: the key batch.count: samples, or tokens, which are the elements of the targets except
            the loss's ``ignore_index``, by default -100.

    Raises:
        UserError: the batch is not a pair, or lacks the key.
    """
    inputs, expected = _inputs_and_targets(batch, targets)
    if isinstance(inputs, Tensor):
        outputs = model(inputs)
    elif isinstance(inputs, Mapping):
        outputs = model(**inputs)
    else:
        outputs = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    produced = first_tensor(outputs)
    labels = first_tensor(expected)
    if produced is not None and labels is not None and labels.device != produced.device:
        # A model on several devices ends on the last device.
        expected = to_device(expected, produced.device)
        labels = first_tensor(expected)
    if labels is None:
        raise UserError(
            f"the targets of the dataset's batches are {shape_of(expected)}",
            "return tensors, or write a training step of your own: train.step=my_package.step",
        )
    ignored = _ignore_index(loss)
    num_counted = labels.shape[0] if count == "samples" else labels.ne(ignored).sum()
    try:
        loss_sum = loss(outputs, expected)
    except IndexError:  # a target that is not a class; on a GPU, CUDA ends the process instead
        if produced is not None and produced.ndim > 1:
            classes = labels.masked_fill(labels == ignored, IGNORED)
            validate_classes(classes, num_classes=produced.shape[1])
        raise
    if ignored != IGNORED and isinstance(expected, Tensor):  # the metrics only ignore -100
        expected = expected.masked_fill(expected == ignored, IGNORED)
    return StepOutput(loss_sum, num_counted, outputs=outputs, targets=expected)


def _inputs_and_targets(batch: Any, targets: str | None) -> tuple[Any, Any]:
    """Return the two parts of a batch; for `targets` and the error see ``supervised``."""
    if targets is not None and isinstance(batch, Mapping) and targets in batch:
        return {key: value for key, value in batch.items() if key != targets}, batch[targets]
    if targets is None and isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    actual = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        actual += f" with {', '.join(map(str, batch))}"
    elif isinstance(batch, tuple | list):
        actual += f" of {len(batch)}"
    expected = "a pair (inputs, targets)" if targets is None else f"a mapping with {targets}"
    raise UserError(
        f"the ordinary training step takes {expected}, and the dataset's batches are {actual}",
        "write train.step={_target_:ddp_runner.train.step.supervised,targets:KEY} for a mapping, "
        "or a step of your own: train.step=my_package.step",
    )


def _ignore_index(loss: Callable[..., Any]) -> int:
    """Return the target that a loss ignores."""
    if isinstance(loss, partial):
        return int(loss.keywords.get("ignore_index", _ignore_index(loss.func)))
    return int(getattr(loss, "ignore_index", IGNORED))


def predicted(model: nn.Module, batch: Any, *, targets: str | None = None) -> StepOutput:
    """Return the ordinary step's outputs for task=predict, also for batches without targets."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    has_targets = is_pair if targets is None else isinstance(batch, Mapping) and targets in batch
    if not has_targets:
        batch, targets = (batch, torch.zeros(0)), None
    step = supervised(model, batch, loss=lambda *_: torch.zeros(()), targets=targets)
    return step if has_targets else replace(step, targets=None)


def step_of(config: RunConfig) -> str:
    """Return the name of the training step for messages."""
    step = config.train.step
    return f"train.step={step['_target_'] if isinstance(step, Mapping) else step}"


def modules_of(step: StepFunction) -> dict[str, Any]:
    """Return the parts of a training step that have a state, by name.

    A part is the step itself, a keyword argument such as its loss, or an attribute of a callable
    object. It has a state if it has ``state_dict`` and ``load_state_dict``.
    """
    parts = {"step": step}
    if isinstance(step, partial):
        parts = {f"step.{name}": value for name, value in step.keywords.items()}
        parts |= {"step": step.func}
    elif not isinstance(step, nn.Module) and not _has_state(step):
        parts |= {f"step.{name}": value for name, value in getattr(step, "__dict__", {}).items()}
    return {name: value for name, value in parts.items() if _has_state(value)}


def _has_state(value: object) -> bool:
    methods = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(hasattr(value, name) for name in methods)
