"""Sources without files: scikit-learn's digits, generated images, and random numbers."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ddp_runner.data.dataset import Augmentation, Dataset, splits
from ddp_runner.data.sources.shared import image_dataset

TRAIN_DIGITS = 1437  # of 1797: four fifths
DIGIT_SIZE = 28  # pixels, as in MNIST


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: scans of 8x8 pixels (the UCI set, 1797 samples) scaled to 28x28."""

    name: str
    mean: float  # mean of the training pixels, scaled to 0..1
    std: float
    num_classes: int = 10
    channels: int = 1  # the grey pixels are repeated for more channels
    augmentation: Augmentation | None = None

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the field that the images depend on."""
        return {"channels": self.channels}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Scale and split the scans into uint8 ``(n, channels, 28, 28)``; the split is fixed."""
        from sklearn.datasets import load_digits  # slow to import, and needed only here

        scans = load_digits()
        images = torch.from_numpy(scans.images).float().unsqueeze(1) * (255 / 16)  # from 0..16
        images = interpolate(images, size=(DIGIT_SIZE, DIGIT_SIZE), mode="bilinear")
        images = images.round_().to(torch.uint8).expand(-1, self.channels, -1, -1)
        targets = torch.from_numpy(scans.target).long()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        tensors: dict[str, Tensor] = {}
        for split, part in (("train", order[:TRAIN_DIGITS]), ("eval", order[TRAIN_DIGITS:])):
            tensors |= {f"{split}_inputs": images[part], f"{split}_targets": targets[part]}
        return tensors

    dataset = image_dataset


@dataclass(frozen=True)
class FakeImages:
    """Images of any shape: each is its class's fixed random pattern plus equally strong noise."""

    name: str
    num_samples: int
    eval_samples: int
    channels: int
    height: int  # pixels
    width: int  # pixels
    num_classes: int
    seed: int  # for the data; the run has its own seed
    augmentation: Augmentation | None = None
    # A pixel is the sum of two uniform integers in 0..127.
    mean: ClassVar[float] = 127 / 255
    std: ClassVar[float] = math.sqrt(2 * (128**2 - 1) / 12) / 255

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields that the images depend on."""
        return {key: value for key, value in asdict(self).items() if key != "augmentation"}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Draw both splits, uint8 ``(n, channels, height, width)``."""
        generator = torch.Generator().manual_seed(self.seed)

        def half_range(count: int) -> Tensor:
            shape = (count, self.channels, self.height, self.width)
            return torch.randint(128, shape, dtype=torch.uint8, generator=generator)

        patterns = half_range(self.num_classes)
        tensors = {}
        for split, num_samples in (("train", self.num_samples), ("eval", self.eval_samples)):
            targets = torch.randint(self.num_classes, (num_samples,), generator=generator)
            tensors[f"{split}_inputs"] = patterns[targets].add_(half_range(num_samples))
            tensors[f"{split}_targets"] = targets
        return tensors

    dataset = image_dataset


@dataclass(frozen=True)
class RandomRegression:
    """Inputs ``(n, input_size)`` and targets ``(n, target_size)``, standard normal, float32."""

    name: str
    num_samples: int
    eval_samples: int
    input_size: int
    target_size: int
    seed: int  # for the data; the run has its own seed

    def fingerprint(self, data_root: Path) -> None:
        """Return None: drawing the numbers is cheaper than reading them."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Draw both splits."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = {}
        for split, num_samples in (("train", self.num_samples), ("eval", self.eval_samples)):
            for part, size in (("inputs", self.input_size), ("targets", self.target_size)):
                tensors[f"{split}_{part}"] = torch.randn(num_samples, size, generator=generator)
        return tensors

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset, a regression."""
        return Dataset(self.name, *splits(tensors), num_classes=None)
