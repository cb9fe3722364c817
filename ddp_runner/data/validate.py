"""What a source of data must return, validated once when a dataset is loaded."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset
from ddp_runner.errors import UserError

METHODS = ("fingerprint", "build", "dataset")
KEYS = ("train_inputs", "train_targets", "eval_inputs", "eval_targets")


def validate_source(source: object) -> None:
    """Refuse an object that is not a source, such as a torch.utils.data.Dataset.

    Raises:
        UserError: it lacks a method of ``Source``.
    """
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    if missing:
        kind = f"{type(source).__module__}.{type(source).__qualname__}"
        raise UserError(
            f"dataset._target_ ({kind}) is not a source of data: it has no {', '.join(missing)}; "
            "write a class with the methods of ddp_runner.data.dataset.Source, whose build returns "
            "all samples as tensors"
        )


def validate_tensors(name: str, tensors: object) -> None:
    """Refuse anything but a mapping of the four tensors.

    Raises:
        UserError: a key is missing, or its value is not a tensor.
    """
    if not isinstance(tensors, Mapping):
        raise UserError(
            f"the build of dataset={name} returned a {type(tensors).__name__}; it must return a "
            f"mapping with {', '.join(KEYS)}"
        )
    for key in KEYS:
        if key not in tensors:
            raise UserError(
                f"the build of dataset={name} returned no {key}, only {', '.join(tensors)}; it "
                f"must return {', '.join(KEYS)}"
            )
        if not isinstance(tensors[key], Tensor):
            raise UserError(
                f"the build of dataset={name} returned a {type(tensors[key]).__name__} as {key}; "
                "it must be one tensor with a sample in each row"
            )


def validate_dataset(name: str, dataset: object) -> None:
    """Refuse splits that cannot be trained on, and classes out of range.

    Raises:
        UserError: the message has the split and what is wrong with it.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"dataset={name} made a {type(dataset).__name__} of its tensors; its method dataset "
            "must return a ddp_runner.data.dataset.Dataset"
        )
    for kind, split in (("train", dataset.train), ("eval", dataset.eval)):
        for part, tensor in (("inputs", split.inputs), ("targets", split.targets)):
            if not isinstance(tensor, Tensor):
                raise UserError(
                    f"the {kind} {part} of dataset={name} are a {type(tensor).__name__}; they "
                    "must be one tensor with a sample in each row"
                )
        num_inputs, num_targets = len(split.inputs), len(split.targets)
        if not num_inputs or num_inputs != num_targets:
            raise UserError(
                f"dataset={name} has {num_inputs} {kind} inputs and {num_targets} {kind} targets; "
                "give the same number of both, at least 1"
            )
        if dataset.num_classes is not None:
            _validate_classes(f"the {kind} targets of dataset={name}", split.targets, dataset)


def _validate_classes(subject: str, targets: Tensor, dataset: Dataset) -> None:
    classes = dataset.num_classes
    if targets.dtype != torch.int64 or targets.ndim != 1:
        dtype = str(targets.dtype).removeprefix("torch.")
        raise UserError(
            f"{subject} are {dtype} of shape {tuple(targets.shape)}; {classes} classes need int64 "
            f"of shape ({len(targets)},), or num_classes=None for a regression"
        )
    lowest, highest = map(int, targets.aminmax())
    if lowest < 0 or highest >= (classes or 0):
        raise UserError(
            f"{subject} go from {lowest} to {highest}; {classes} classes are numbered from 0 to "
            f"{(classes or 0) - 1}"
        )
