"""Handwritten digits from scikit-learn: real data without a download."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ddp_runner.data.dataset import Augmentation
from ddp_runner.data.sources import shared

TRAIN_SAMPLES = 1437  # of 1797: four fifths
IMAGE_SIZE = 28  # pixels, as in MNIST
SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Scans of 8x8 pixels (the UCI set, 1797 samples) scaled to MNIST's 28x28."""

    name: str
    mean: float  # of the train split's pixels, scaled to 0..1
    std: float
    num_classes: int = 10
    channels: int = 1  # more: the grey pixels repeated
    augmentation: Augmentation | None = None

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the constants of this module and the fields that count."""
        return {
            "train_samples": TRAIN_SAMPLES,
            "size": IMAGE_SIZE,
            "split_seed": SPLIT_SEED,
            "channels": self.channels,
            "num_classes": self.num_classes,
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Scale and split the scans into uint8 ``(n, channels, 28, 28)``; the split is fixed.

        Raises:
            UserError: channels is below 1, or num_classes below 10.
        """
        shared.require_at_least(self, channels=1, num_classes=10)
        from sklearn.datasets import load_digits  # slow to import, and needed only here

        scans = load_digits()
        images = torch.from_numpy(scans.images).float().unsqueeze(1) * (255 / 16)  # from 0..16
        images = interpolate(images, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
        images = images.round_().to(torch.uint8).expand(-1, self.channels, -1, -1)
        targets = torch.from_numpy(scans.target).long()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        tensors: dict[str, Tensor] = {}
        for split, part in (("train", order[:TRAIN_SAMPLES]), ("eval", order[TRAIN_SAMPLES:])):
            tensors |= {f"{split}_inputs": images[part], f"{split}_targets": targets[part]}
        return tensors

    dataset = shared.image_dataset
