"""A dataset as the rest of the program sees it, and the protocols of its sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ddp_runner.data.splits import AbsentSplit, TensorSplit, validate_classes
from ddp_runner.data.stream import Split
from ddp_runner.data.trees import to_device
from ddp_runner.device import upload
from ddp_runner.errors import UserError

KEYS = ("train_inputs", "train_targets", "eval_inputs", "eval_targets")


class Augmentation(Protocol):
    """A random change of a batch's training samples."""

    @property
    def num_randoms(self) -> int:
        """Return the random numbers that each sample takes."""

    def __call__(self, inputs: Tensor, randoms: Tensor) -> Tensor:
        """Return the changed inputs (batch, ...); they come normalised, on the device.

        `randoms` (batch, num_randoms), uniform in [0, 1), are the same at every world size.
        """


@dataclass(frozen=True)
class Dataset:
    """Both splits of a dataset, and how a batch becomes a model's input."""

    name: str
    train: Split
    eval: Split
    num_classes: int | None  # None: the targets are not classes
    # Mean and standard deviation of pixels scaled to 0..1, for all channels or for each.
    mean: float | Sequence[float] | None = 0.0  # None: use batches as they are loaded
    std: float | Sequence[float] = 1.0
    augmentation: Augmentation | None = None
    padding_id: int | None = None  # pads short sequences; a batch is cut to its longest
    vocab_size: int | None = None  # tokens the model must know: every id is below it
    group_by_length: bool = False  # put sequences of similar length in one batch
    files: Mapping[str, bytes] = field(default_factory=dict)  # path in the run folder -> content
    notes: tuple[str, ...] = ()  # printed when the run starts
    # SHA-256 of all samples, or "files:" and a digest of their files; None: unknown.
    digest: str | None = None

    def prepare(self, data: Any, device: torch.device, *, randoms: Tensor | None = None) -> Any:
        """Return a loaded batch on the device, with images normalised.

        `randoms` (batch, num_randoms) are for the augmentation; None: do not augment.
        """
        # On the CPU, where it was loaded. Other trees are rebuilt: a user's step may change them.
        is_there = device.type == "cpu" and type(data) is tuple and {*map(type, data)} <= {Tensor}
        if self.mean is None:
            return data if is_there else to_device(data, device)
        inputs, targets = data
        if self.padding_id is not None and inputs.device.type == "cpu":  # on a GPU the split cuts
            inputs = inputs[:, : int(ends(inputs, self.padding_id).max())]
        if not is_there:
            inputs, targets = to_device((inputs, targets), device)
        inputs = self.normalize(inputs)
        if self.augmentation is not None and randoms is not None:
            inputs = self.augmentation(inputs, upload(randoms, device))
        return inputs, targets

    def near(self, split: Split, device: torch.device) -> Split:
        """Return the split on a GPU if it is small enough, else unchanged."""
        moved = split.near(device)
        if self.padding_id is not None and isinstance(moved, TensorSplit) and moved is not split:
            moved = replace(moved, ends=ends(moved.inputs, self.padding_id).cpu())
        return moved

    def lengths(self) -> Tensor:
        """Return the number of tokens of each training sample, int64 (num_samples,)."""
        assert self.padding_id is not None
        assert isinstance(self.train, TensorSplit)
        return ends(self.train.inputs, self.padding_id)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that a model's constructor may take from the data."""
        facts = {"padding_id": self.padding_id, "vocab_size": self.vocab_size}
        return {name: value for name, value in facts.items() if value is not None}

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return uint8 images as float32 ``(x / 255 - mean) / std``; other inputs unchanged.

        Call it after the copy to the device: a uint8 image has a quarter of the bytes.
        """
        if inputs.dtype != torch.uint8 or self.mean is None:
            return inputs
        if isinstance(self.mean, float | int) and isinstance(self.std, float | int):
            pixels = inputs.float()
            if self.mean:  # subtracting 0 would cost a pass over the batch
                pixels.sub_(255 * self.mean)
            return pixels.mul_(1 / (255 * self.std))
        mean, std = (
            tuple(value) if isinstance(value, Sequence) else value
            for value in (self.mean, self.std)
        )
        shift, factor = _scaling(mean, std, inputs.device)
        return inputs.float().sub_(shift).mul_(factor)


def ends(inputs: Tensor, padding_id: int) -> Tensor:
    """Return the length without padding of inputs (num_samples, tokens), int64, at least 1."""
    positions = torch.arange(1, inputs.shape[1] + 1, dtype=torch.int32, device=inputs.device)
    return (inputs.ne(padding_id) * positions).amax(dim=1).clamp(min=1).long()


@cache
def _scaling(
    mean: float | tuple[float, ...], std: float | tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the shift and the factor of ``normalize``, float32 (channels or 1, 1, 1).

    They are cached on the device: a copy for each batch would make the GPU wait each time.
    """
    shift, scale = (
        255 * torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std)
    )
    return shift.float().to(device), (1 / scale).float().to(device)


@runtime_checkable
class Source(Protocol):
    """Opens a dataset: a frozen dataclass whose fields are the keys of its YAML."""

    @property
    def name(self) -> str:
        """Return the dataset's name in messages."""

    def open(self, data_root: Path) -> Dataset | None:
        """Return the dataset; samples may be loaded later, batch by batch.

        A ``TensorSource`` may have this method, too; None: the cache must prepare the tensors.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is unusable.
        """


@runtime_checkable
class TensorSource(Protocol):
    """Builds a dataset's tensors, which are cached: a frozen dataclass like ``Source``."""

    @property
    def name(self) -> str:
        """Return the dataset's name in messages and in the cache."""

    def fingerprint(self, data_root: Path) -> dict[str, object] | None:
        """Return everything the tensors depend on, for JSON; None: do not cache them."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Return the tensors named in ``KEYS``, the same bits on each call; see ``TensorSplit``.

        The cache also keeps any other tensors in the result.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is unusable.
        """

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset of the tensors of ``build``, which may come from the cache."""


def splits(tensors: Mapping[str, Tensor]) -> tuple[TensorSplit, TensorSplit]:
    """Return the training and the evaluation split of a source's tensors."""
    return (
        TensorSplit(tensors["train_inputs"], tensors["train_targets"]),
        TensorSplit(tensors["eval_inputs"], tensors["eval_targets"]),
    )


def validate_tensors(name: str, tensors: object) -> Mapping[str, Tensor]:
    """Return the result of a ``build``; a ``UserError`` unless it maps KEYS to tensors."""
    mapping: Mapping[str, Any] = tensors if isinstance(tensors, Mapping) else {}
    for key in KEYS:
        if not isinstance(value := mapping.get(key), Tensor):
            fault = f"no {key}" if value is None else f"a {type(value).__name__} as {key}"
            raise UserError(
                f"the build of dataset={name} returned "
                f"{fault if mapping else type(tensors).__name__}",
                f"return a mapping with {', '.join(KEYS)}, each a tensor with one sample per row",
            )
    return mapping


def validate_dataset(name: str, dataset: object) -> Dataset:
    """Return the dataset if its splits can be trained on.

    Raises:
        UserError: a split is empty, has another type, or has classes out of range.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"dataset={name} made a {type(dataset).__name__}",
            "return a ddp_runner.data.dataset.Dataset from its method dataset or open",
        )
    for kind, split in (("train", dataset.train), ("eval", dataset.eval)):
        if not isinstance(split, Split):
            raise UserError(
                f"the {kind} split of dataset={name} is a {type(split).__name__}",
                "inherit from ddp_runner.data.splits.NumberedSplit",
            )
        if not isinstance(split, TensorSplit):
            if split.num_samples == 0 and not isinstance(split, AbsentSplit):
                raise UserError(f"dataset={name} has no {kind} samples", "give at least 1")
            continue
        num_inputs, num_targets = len(split.inputs), len(split.targets)
        if not num_inputs or num_inputs != num_targets:
            raise UserError(
                f"dataset={name} has {num_inputs} {kind} inputs and {num_targets} {kind} targets",
                "give the same number of both, at least 1",
            )
        if dataset.num_classes is not None:
            subject = f"the {kind} targets of dataset={name}"
            if split.targets.dtype != torch.int64:
                dtype = str(split.targets.dtype).removeprefix("torch.")
                raise UserError(
                    f"{subject} are {dtype} of shape {tuple(split.targets.shape)}",
                    "give int64 for "
                    f"{dataset.num_classes} classes, or num_classes=None for a regression",
                )
            validate_classes(split.targets, num_classes=dataset.num_classes, subject=subject)
    return dataset
