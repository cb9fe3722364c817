"""The training step: what a run computes for a batch before the backward. Users bring their own.

The key ``train.step`` names it. The ordinary one, ``supervised``, is the default and the example.
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
    """What a training step returns for one batch.

    The runner divides sums by the count over all micro-batches and ranks, so that every split of a
    global batch takes the same step. Evaluation uses the same function, without gradients.
    """

    loss_sum: Tensor  # a scalar: the loss, summed over what is counted
    count: int | Tensor  # samples, or tokens with batch.count=tokens
    outputs: Any = None  # for the metrics; None: no metrics of outputs
    targets: Any = None  # for the metrics
    # More sums over what is counted, logged per sample or token as train/NAME and eval/NAME.
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
        targets: the key of a mapping that holds the targets; the model gets all the others.
        count: what the loss is divided by: samples, or tokens, which are all single targets but
            those that the loss ignores: its ``ignore_index``, else -100. It is the key batch.count.

    Raises:
        UserError: the batch is no pair, or has no such key.
    """
    if targets is not None and isinstance(batch, Mapping) and targets in batch:
        inputs = {key: value for key, value in batch.items() if key != targets}
        expected = batch[targets]
    elif targets is None and isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, expected = batch
    else:
        raise UserError(_misfit(batch, targets))
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, tuple | list):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    produced = first_tensor(outputs)
    if produced is not None:  # a model on several devices ends on the last of them
        expected = to_device(expected, produced.device)
    labels = first_tensor(expected)
    if labels is None:
        raise UserError(
            f"the targets of the dataset's batches are {shape_of(expected)}; return tensors, or "
            "write a training step of your own: train.step=my_package.step"
        )
    ignored = _ignored_by(loss)
    counted = len(labels) if count == "samples" else labels.ne(ignored).sum()
    try:
        loss_sum = loss(outputs, expected)
    except IndexError:  # a class that is none; on a GPU CUDA ends the process
        if produced is not None and produced.ndim > 1:
            known = labels.masked_fill(labels == ignored, IGNORED)
            validate_classes(known, num_classes=produced.shape[1])
        raise
    if ignored != IGNORED and isinstance(expected, Tensor):  # the metrics know -100 alone
        expected = expected.masked_fill(expected == ignored, IGNORED)
    return StepOutput(loss_sum, counted, outputs=outputs, targets=expected)


def _ignored_by(loss: Callable[..., Any]) -> int:
    """Return the target that a loss leaves out."""
    if isinstance(loss, partial):
        return int(loss.keywords.get("ignore_index", _ignored_by(loss.func)))
    return int(getattr(loss, "ignore_index", IGNORED))


def predicted(model: nn.Module, batch: Any, *, targets: str | None = None) -> StepOutput:
    """Return the ordinary step of task=predict: of a batch without targets all are inputs."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    has_targets = is_pair if targets is None else isinstance(batch, Mapping) and targets in batch
    if not has_targets:
        batch, targets = (batch, torch.zeros(0)), None
    step = supervised(model, batch, loss=lambda *_: torch.zeros(()), targets=targets)
    return step if has_targets else replace(step, targets=None)


def step_of(config: RunConfig) -> str:
    """Return how a message names the training step."""
    named = config.train.step
    return f"train.step={named['_target_'] if isinstance(named, Mapping) else named}"


def modules_of(step: StepFunction) -> dict[str, Any]:
    """Return by name what keeps a state in a training step: the step itself, its loss, its parts.

    That is every module, and whatever else has ``state_dict`` and ``load_state_dict``: the step, a
    keyword that it was given, or an attribute of an object that is called.
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


def _misfit(batch: Any, targets: str | None) -> str:
    found = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        found += f" with {', '.join(map(str, batch))}"
    elif isinstance(batch, tuple | list):
        found += f" of {len(batch)}"
    wanted = "a pair (inputs, targets)" if targets is None else f"a mapping with {targets}"
    return (
        f"the ordinary training step takes {wanted}, and the dataset's batches are {found}; write "
        "train.step={_target_:ddp_runner.train.step.supervised,targets:KEY} for a mapping, or a "
        "step of your own: train.step=my_package.step"
    )
