"""What a dataset is to the rest of the program, and what a new source of data must offer."""

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
    """Inputs ``(num_samples, ...)`` and targets: int64 classes ``(num_samples,)`` or floats."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.inputs)


class Augmentation(Protocol):
    """Changes each training sample at random, a whole batch at once."""

    @property
    def num_randoms(self) -> int:
        """How many random numbers a sample takes."""

    def __call__(self, inputs: Tensor, randoms: Tensor) -> Tensor:
        """Return the changed inputs (batch, ...).

        Args:
            inputs: normalised, on the device.
            randoms: uniform in 0..1, (batch, num_randoms), the same at every world size.
        """


@dataclass(frozen=True)
class Dataset:
    """Both splits of a dataset, and how a batch of it becomes a model's input."""

    name: str
    train: Split
    eval: Split
    num_classes: int | None  # None: a regression
    mean: float | Sequence[float] = 0.0  # of the pixels, scaled to 0..1; or of each channel
    std: float | Sequence[float] = 1.0
    augmentation: Augmentation | None = None
    padding_id: int | None = None  # fills up short sequences; a batch is cut to its longest
    vocab_size: int | None = None  # of a tokenizer that came with a model: all ids are below it
    group_by_length: bool = False  # batches of sequences of similar length
    files: Mapping[str, bytes] = field(default_factory=dict)  # a vocabulary: kept with the run
    notes: tuple[str, ...] = ()  # what a user should know of the data; said at start
    digest: str | None = None  # of all samples' bytes; None: they are drawn, not prepared

    def prepare(
        self, inputs: Tensor, device: torch.device, *, randoms: Tensor | None = None
    ) -> Tensor:
        """Return a batch as the model wants it, on the device.

        Args:
            inputs: (batch, ...) as stored.
            device: where the model wants them.
            randoms: for the augmentation, (batch, num_randoms); None: none, as in evaluation.
        """
        if self.padding_id is not None:
            is_token = inputs.ne(self.padding_id).any(dim=0)
            inputs = inputs[:, : int(is_token.nonzero().max()) + 1 if is_token.any() else 1]
        inputs = self.normalize(inputs.to(device, non_blocking=True))
        if self.augmentation is None or randoms is None:
            return inputs
        return self.augmentation(inputs, randoms.to(device, non_blocking=True))

    def lengths(self) -> Tensor:
        """The number of tokens of each training sample, int64 (num_samples,)."""
        assert self.padding_id is not None
        return self.train.inputs.ne(self.padding_id).sum(dim=1)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Return what a model's constructor may take by these names: facts of the data itself."""
        facts = {"padding_id": self.padding_id, "vocab_size": self.vocab_size}
        return {name: value for name, value in facts.items() if value is not None}

    @property
    def num_randoms(self) -> int:
        """Random numbers of a training sample."""
        return 0 if self.augmentation is None else self.augmentation.num_randoms

    def normalize(self, inputs: Tensor) -> Tensor:
        """Images of uint8 as float32 ``(x / 255 - mean) / std``; other inputs as they are.

        Call it on the device, after the copy: a uint8 image is a quarter of the bytes to move.
        """
        if inputs.dtype != torch.uint8:
            return inputs
        if isinstance(self.mean, float | int) and isinstance(self.std, float | int):
            return inputs.float().sub_(255 * self.mean).mul_(1 / (255 * self.std))
        mean, std = (
            (one,) if isinstance(one, float | int) else tuple(one) for one in (self.mean, self.std)
        )
        shift, factor = _scaling(mean, std, inputs.device)
        return inputs.float().sub_(shift).mul_(factor)


@cache
def _scaling(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """What ``normalize`` subtracts and multiplies with, (channels, 1, 1).

    It stays on the device: to copy it there for each batch would make a GPU wait each time.
    """
    mean_, std_ = (torch.tensor(one, dtype=torch.float64).view(-1, 1, 1) for one in (mean, std))
    return (255 * mean_).float().to(device), (1 / (255 * std_)).float().to(device)


@runtime_checkable
class Source(Protocol):
    """Builds a dataset's tensors; a frozen dataclass whose fields are the keys of its YAML."""

    @property
    def name(self) -> str:
        """Names the dataset in messages and in the cache."""

    def fingerprint(self, data_root: Path) -> dict[str, object] | None:
        """All that the tensors depend on, as JSON; None where building is cheaper than a cache."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """``{train,eval}_{inputs,targets}``, the same bits on each call; images as uint8 NCHW.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is not usable.
        """

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """What ``build`` returned, perhaps read back from the cache, as a dataset."""


def splits(tensors: Mapping[str, Tensor]) -> tuple[Split, Split]:
    """What a source built as train and eval split."""
    return (
        Split(tensors["train_inputs"], tensors["train_targets"]),
        Split(tensors["eval_inputs"], tensors["eval_targets"]),
    )


class ImageSource(Source, Protocol):
    """A source of images with classes."""

    @property
    def num_classes(self) -> int:
        """How many classes there are."""

    @property
    def mean(self) -> float | Sequence[float]:
        """Mean of the pixels, scaled to 0..1; or of each channel."""

    @property
    def std(self) -> float | Sequence[float]:
        """Their standard deviation."""

    @property
    def augmentation(self) -> Augmentation | None:
        """What changes the training images."""


def image_dataset(source: ImageSource, tensors: Mapping[str, Tensor]) -> Dataset:
    """What a source of images built, to be normalised."""
    return Dataset(
        source.name,
        *splits(tensors),
        num_classes=source.num_classes,
        mean=source.mean,
        std=source.std,
        augmentation=source.augmentation,
    )


def require_positive(source: Source, *fields: str) -> None:
    """Check sizes that come from the config.

    Raises:
        UserError: one of the named fields is below 1.
    """
    for name in fields:
        value = getattr(source, name)
        if value < 1:
            raise UserError(f"dataset.{name} ({value}) must be at least 1; use 1 or more")
