"""A dataset as the rest of the program sees it, and what a source of data must give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ddp_runner.data.splits import AbsentSplit, Split, TensorSplit, validate_classes
from ddp_runner.data.trees import to_device
from ddp_runner.device import upload
from ddp_runner.errors import UserError

KEYS = ("train_inputs", "train_targets", "eval_inputs", "eval_targets")


class Augmentation(Protocol):
    """Changes the training samples of a batch at random."""

    @property
    def num_randoms(self) -> int:
        """Return how many random numbers a sample takes."""

    def __call__(self, inputs: Tensor, randoms: Tensor) -> Tensor:
        """Return the changed inputs (batch, ...), which are normalised and on the device.

        `randoms` (batch, num_randoms), uniform in [0, 1), are the same at every world size.
        """


@dataclass(frozen=True)
class Dataset:
    """Both splits of a dataset, and how a batch becomes a model's input."""

    name: str
    train: Split
    eval: Split
    num_classes: int | None  # None: the targets are not classes
    # Of the pixels scaled to 0..1, or one per channel; None: batches are used as they are loaded.
    mean: float | Sequence[float] | None = 0.0
    std: float | Sequence[float] = 1.0  # likewise
    augmentation: Augmentation | None = None
    padding_id: int | None = None  # fills up short sequences; a batch is cut to its longest
    vocab_size: int | None = None  # of a tokenizer that decides the model's: all ids are below it
    group_by_length: bool = False  # put sequences of similar length in one batch
    files: Mapping[str, bytes] = field(default_factory=dict)  # by path, copied to the run's folder
    notes: tuple[str, ...] = ()  # about the data, printed when the run starts
    # SHA-256 of all samples, or "files:" and one of the files that hold them; None: unknown.
    digest: str | None = None

    def prepare(self, data: Any, device: torch.device, *, randoms: Tensor | None = None) -> Any:
        """Return a batch, as it was loaded, on the device and as the training step takes it.

        The inputs of images are normalised. The augmentation takes `randoms`, (batch,
        num_randoms); None: no augmentation.
        """
        if self.mean is None:
            return to_device(data, device)
        inputs, targets = data
        if self.padding_id is not None and inputs.device.type == "cpu":  # else its split has cut it
            inputs = inputs[:, : int(ends(inputs, self.padding_id).max())]
        inputs, targets = to_device((inputs, targets), device)
        inputs = self.normalize(inputs)
        if self.augmentation is not None and randoms is not None:
            inputs = self.augmentation(inputs, upload(randoms, device))
        return inputs, targets

    def near(self, split: Split, device: torch.device) -> Split:
        """Return a split of the dataset on a GPU if it is small enough, else as it is."""
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
        """Return the facts of the data that a model's constructor may take, by keyword."""
        facts = {"padding_id": self.padding_id, "vocab_size": self.vocab_size}
        return {name: value for name, value in facts.items() if value is not None}

    @property
    def num_randoms(self) -> int:
        """Return the random numbers of a training sample."""
        return 0 if self.augmentation is None else self.augmentation.num_randoms

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return uint8 images as float32 ``(x / 255 - mean) / std``; other inputs unchanged.

        Call it after the copy to the device: a uint8 image has a quarter of the bytes.
        """
        if inputs.dtype != torch.uint8 or self.mean is None:
            return inputs
        if isinstance(self.mean, float | int) and isinstance(self.std, float | int):
            pixels = inputs.float()
            if self.mean:  # else a pass over the batch would change nothing
                pixels.sub_(255 * self.mean)
            return pixels.mul_(1 / (255 * self.std))
        facts = (self.mean, self.std)
        mean, std = (tuple(one) if isinstance(one, Sequence) else one for one in facts)
        shift, factor = _scaling(mean, std, inputs.device)
        return inputs.float().sub_(shift).mul_(factor)


def ends(inputs: Tensor, padding_id: int) -> Tensor:
    """Return where each sequence of inputs (num_samples, tokens) ends, int64, at least 1."""
    places = torch.arange(1, inputs.shape[1] + 1, dtype=torch.int32, device=inputs.device)
    return (inputs.ne(padding_id) * places).amax(dim=1).clamp(min=1).long()


@cache
def _scaling(
    mean: float | tuple[float, ...], std: float | tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what ``normalize`` subtracts and multiplies by, float32 (channels or 1, 1, 1).

    It is cached on the device: a copy for each batch would make the GPU wait each time.
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
        """Return the dataset; its samples may stay where they are until a batch needs them.

        A ``TensorSource`` may have this method, too: it returns None if the cache shall prepare
        the tensors.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is unusable.
        """


@runtime_checkable
class TensorSource(Protocol):
    """Builds a dataset's tensors, which are cached: a frozen dataclass as ``Source``."""

    @property
    def name(self) -> str:
        """Return the dataset's name in messages and in the cache."""

    def fingerprint(self, data_root: Path) -> dict[str, object] | None:
        """Return what the tensors depend on, as JSON; None: building is cheaper than a cache."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Return the tensors named in ``KEYS``, the same bits on each call; see ``TensorSplit``.

        More tensors may come with them: the cache keeps all for ``dataset``.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is unusable.
        """

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset of the tensors that ``build`` returned, or the cache gave back."""


@runtime_checkable
class NamedSamples(Protocol):
    """A source that knows its samples by more than their numbers, so that predictions name them."""

    def sample_names(self, data_root: Path) -> Mapping[str, Sequence[str | int]]:
        """Return for train and eval what a user calls each sample, in order: a file, a line.

        Raises:
            UserError: a file under ``data_root`` is unusable.
        """


def splits(tensors: Mapping[str, Tensor]) -> tuple[TensorSplit, TensorSplit]:
    """Return the training and the evaluation split of a source's tensors."""
    return (
        TensorSplit(tensors["train_inputs"], tensors["train_targets"]),
        TensorSplit(tensors["eval_inputs"], tensors["eval_targets"]),
    )


def validate_tensors(name: str, tensors: object) -> Mapping[str, Tensor]:
    """Return what a ``build`` returned; reject anything but a mapping with the four tensors.

    Raises:
        UserError: a key is missing, or its value is not a tensor.
    """
    found: Mapping[str, Any] = tensors if isinstance(tensors, Mapping) else {}
    for key in KEYS:
        if not isinstance(value := found.get(key), Tensor):
            what = f"no {key}" if value is None else f"a {type(value).__name__} as {key}"
            raise UserError(
                f"the build of dataset={name} returned {what if found else type(tensors).__name__};"
                f" it must return a mapping with {', '.join(KEYS)}, each one tensor with a sample "
                "in each row"
            )
    return found


def validate_dataset(name: str, dataset: object) -> Dataset:
    """Return the dataset; reject splits that cannot be trained on, and classes out of range.

    Raises:
        UserError: the message has the split and what is wrong with it.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"dataset={name} made a {type(dataset).__name__}; its method dataset or open must "
            "return a ddp_runner.data.dataset.Dataset"
        )
    for kind, split in (("train", dataset.train), ("eval", dataset.eval)):
        if not hasattr(split, "in_order"):
            found = f"the {kind} split of dataset={name} is a {type(split).__name__}"
            raise UserError(f"{found}; inherit from ddp_runner.data.splits.NumberedSplit")
        if not isinstance(split, TensorSplit):
            if split.num_samples == 0 and not isinstance(split, AbsentSplit):
                raise UserError(f"dataset={name} has no {kind} samples; give at least 1")
            continue
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
            subject = f"the {kind} targets of dataset={name}"
            if split.targets.dtype != torch.int64:
                dtype = str(split.targets.dtype).removeprefix("torch.")
                raise UserError(
                    f"{subject} are {dtype} of shape {tuple(split.targets.shape)}; "
                    f"{dataset.num_classes} classes need int64, or num_classes=None for a "
                    "regression"
                )
            validate_classes(split.targets, num_classes=dataset.num_classes, subject=subject)
    return dataset
