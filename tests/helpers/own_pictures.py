"""A user's dataset of dicts with random augmentation, for configs to name."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

HELPERS = str(Path(__file__).parent)
# The command line that trains on it; 8 steps an epoch, the last of them smaller.
PICTURES = (
    "dataset=torch_dataset",
    "dataset.train={_target_:own_pictures.Pictures,size:90}",
    "dataset.eval={_target_:own_pictures.Pictures,size:20}",
    "dataset.num_classes=4",
    "dataset.num_workers=2",
    "model=toy",
    "model._target_=own_pictures.Classifier",
    "model.loss=ddp_runner.train.losses.cross_entropy",
    "train.step={_target_:ddp_runner.train.step.supervised,targets:label}",
    "batch.global_size=12",
    "optimizer=momentum",
    "optimizer.lr=0.05",
    "train.log_every_steps=1",
    "train.num_threads=1",
    "allowed_targets=[own_pictures]",
)


@dataclass(frozen=True)
class Pictures(Dataset[dict[str, Any]]):
    """Pictures of a bar at one of four places; mirrored and made noisy at random."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = index % 4
        image = torch.zeros(8, 8)
        image[2 * label : 2 * label + 2] = 1
        if random.random() < 0.5:
            image = image.flip(1)
        image += 0.3 * torch.randn(8, 8) + 0.1 * float(np.random.rand())
        return {"image": image, "label": label}


class Classifier(nn.Module):
    """Map images (batch, 8, 8) to class scores (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, image: Tensor) -> Tensor:
        """Take the images by keyword, as the batch has them."""
        scores: Tensor = self.layers(image)
        return scores
