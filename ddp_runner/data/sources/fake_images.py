"""Made-up images of any shape that a model can learn, for tests and speed measurements."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ddp_runner.data.dataset import Augmentation
from ddp_runner.data.sources import shared


@dataclass(frozen=True)
class FakeImages:
    """Each image is its class's fixed random pattern plus noise of the same strength."""

    name: str
    num_samples: int
    eval_samples: int
    channels: int
    height: int  # pixels
    width: int  # pixels
    num_classes: int
    seed: int  # of the data, not of the run
    augmentation: Augmentation | None = None
    # A pixel is the sum of two uniform integers in 0..127.
    mean: ClassVar[float] = 127 / 255
    std: ClassVar[float] = math.sqrt(2 * (128**2 - 1) / 12) / 255

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields that the images depend on."""
        return {key: value for key, value in asdict(self).items() if key != "augmentation"}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Draw both splits, uint8 ``(n, channels, height, width)``.

        Raises:
            UserError: a size is below 1.
        """
        shared.require_at_least(self, num_samples=1, eval_samples=1, channels=1, height=1, width=1)
        shared.require_at_least(self, num_classes=1)
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

    dataset = shared.image_dataset
