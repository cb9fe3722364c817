"""A dataset as the rest of the program sees it, and the methods of a source of data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ddp_runner.errors import UserError


@dataclass(frozen=True)
class Split:
    """The samples of a training or an evaluation split."""

    inputs: Tensor  # (num_samples, ...); uint8 images: (num_samples, channels, height, width)
    targets: Tensor  # int64 classes (num_samples,), or floats (num_samples, ...)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)


class Augmentation(Protocol):
    """Changes the training samples of a batch at random."""

    @property
    def num_randoms(self) -> int:
        """Return how many random numbers a sample takes."""

    def __call__(self, inputs: Tensor, randoms: Tensor) -> Tensor:
        """Return the changed inputs (batch, ...).

        Args:
            inputs: normalised, on the device.
            randoms: uniform in [0, 1), (batch, num_randoms), the same at every world size.
        """


@dataclass(frozen=True)
class Dataset:
    """Both splits of a dataset, and how a batch becomes a model's input."""

    name: str
    train: Split
    eval: Split
    num_classes: int | None  # None: the targets are not classes
    mean: float | Sequence[float] = 0.0  # of the pixels scaled to 0..1, or one per channel
    std: float | Sequence[float] = 1.0  # likewise
    augmentation: Augmentation | None = None
    padding_id: int | None = None  # fills up short sequences; a batch is cut to its longest
    vocab_size: int | None = None  # of a tokenizer that came with a model: all ids are below it
    group_by_length: bool = False  # put sequences of similar length in one batch
    files: Mapping[str, bytes] = field(default_factory=dict)  # by path, copied to the run's folder
    notes: tuple[str, ...] = ()  # about the data, printed when the run starts
    digest: str | None = None  # SHA-256 of all samples; None: the dataset is not cached

    def prepare(
        self, inputs: Tensor, device: torch.device, *, randoms: Tensor | None = None
    ) -> Tensor:
        """Return a batch as the model's input, on the device.

        Args:
            inputs: (batch, ...) as stored.
            device: of the result.
            randoms: for the augmentation, (batch, num_randoms); None: no augmentation.
        """
        if self.padding_id is not None:
            is_token = inputs.ne(self.padding_id).any(dim=0)
            inputs = inputs[:, : int(is_token.nonzero().max()) + 1 if is_token.any() else 1]
        inputs = self.normalize(inputs.to(device, non_blocking=True))
        if self.augmentation is None or randoms is None:
            return inputs
        return self.augmentation(inputs, randoms.to(device, non_blocking=True))

    def lengths(self) -> Tensor:
        """Return the number of tokens of each training sample, int64 (num_samples,)."""
        assert self.padding_id is not None
        return self.train.inputs.ne(self.padding_id).sum(dim=1)

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
        if inputs.dtype != torch.uint8:
            return inputs
        if isinstance(self.mean, float | int) and isinstance(self.std, float | int):
            return inputs.float().sub_(255 * self.mean).mul_(1 / (255 * self.std))
        mean, std = (
            (value,) if isinstance(value, float | int) else tuple(value)
            for value in (self.mean, self.std)
        )
        shift, factor = _scaling(mean, std, inputs.device)
        return inputs.float().sub_(shift).mul_(factor)


@cache
def _scaling(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what ``normalize`` subtracts and multiplies by, float32 (channels, 1, 1).

    It is cached on the device: a copy for each batch would make the GPU wait each time.
    """
    shift, scale = (torch.tensor(values, dtype=torch.float64) * 255 for values in (mean, std))
    return shift.float().view(-1, 1, 1).to(device), (1 / scale).float().view(-1, 1, 1).to(device)


@runtime_checkable
class Source(Protocol):
    """Builds a dataset's tensors: a frozen dataclass whose fields are the keys of its YAML."""

    @property
    def name(self) -> str:
        """Return the dataset's name in messages and in the cache."""

    def fingerprint(self, data_root: Path) -> dict[str, object] | None:
        """Return what the tensors depend on, as JSON; None: building is cheaper than a cache."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Return ``{train,eval}_{inputs,targets}``, the same bits on each call; see ``Split``.

        More tensors may come with them: the cache keeps all for ``dataset``.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is unusable.
        """

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset of the tensors that ``build`` returned, or the cache gave back."""


def splits(tensors: Mapping[str, Tensor]) -> tuple[Split, Split]:
    """Return the training and the evaluation split of a source's tensors."""
    return (
        Split(tensors["train_inputs"], tensors["train_targets"]),
        Split(tensors["eval_inputs"], tensors["eval_targets"]),
    )


class ImageSource(Source, Protocol):
    """A source of images with classes."""

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""

    @property
    def mean(self) -> float | Sequence[float]:
        """Return the mean of the pixels scaled to 0..1, or one per channel."""

    @property
    def std(self) -> float | Sequence[float]:
        """Return the standard deviation likewise."""

    @property
    def augmentation(self) -> Augmentation | None:
        """Return the change to the training images; None: none."""


def image_dataset(source: ImageSource, tensors: Mapping[str, Tensor]) -> Dataset:
    """Return the dataset of a source of images; its inputs are to be normalised."""
    return Dataset(
        source.name,
        *splits(tensors),
        num_classes=source.num_classes,
        mean=source.mean,
        std=source.std,
        augmentation=source.augmentation,
    )


def require_positive(source: Source, *fields: str) -> None:
    """Refuse sizes below 1.

    Raises:
        UserError: one of the named fields is below 1.
    """
    for name in fields:
        value = getattr(source, name)
        if value < 1:
            raise UserError(f"dataset.{name} ({value}) must be at least 1; use 1 or more")
