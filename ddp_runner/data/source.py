"""What a dataset is to the rest of the program, and what a new source of data must offer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


@dataclass(frozen=True)
class Dataset:
    """Both splits of a dataset, and the statistics that normalise its images."""

    name: str
    train: Split
    eval: Split
    num_classes: int | None  # None: a regression
    mean: float  # of the pixels, scaled to 0..1
    std: float

    def normalize(self, inputs: Tensor) -> Tensor:
        """Images of uint8 as float32 ``(x / 255 - mean) / std``; other inputs as they are.

        Call it on the device, after the copy: a uint8 image is a quarter of the bytes to move.
        """
        if inputs.dtype != torch.uint8:
            return inputs
        return inputs.float().sub_(255 * self.mean).mul_(1 / (255 * self.std))


class Source(Protocol):
    """Builds a dataset's tensors; a frozen dataclass whose fields are the keys of its YAML."""

    @property
    def name(self) -> str:
        """Names the dataset in messages and in the cache."""

    @property
    def mean(self) -> float:
        """Mean of the pixels, scaled to 0..1."""

    @property
    def std(self) -> float:
        """Standard deviation of the pixels, scaled to 0..1."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None for a regression."""

    def fingerprint(self, data_root: Path) -> dict[str, object] | None:
        """All that the tensors depend on, as JSON; None where building is cheaper than a cache."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """``{train,eval}_{inputs,targets}``, the same bits on each call; images as uint8 NCHW.

        Raises:
            UserError: a field of the source or a file under ``data_root`` is not usable.
        """


def require_positive(source: Source, *fields: str) -> None:
    """Check sizes that come from the config.

    Raises:
        UserError: one of the named fields is below 1.
    """
    for field in fields:
        value = getattr(source, field)
        if value < 1:
            raise UserError(f"dataset.{field} ({value}) must be at least 1; use 1 or more")
