"""Random regression data for the toy models: nothing to learn, nothing to download."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset, splits
from ddp_runner.data.sources import shared


@dataclass(frozen=True)
class RandomRegression:
    """Inputs ``(n, input_size)`` and targets ``(n, target_size)``, standard normal, float32."""

    name: str
    num_samples: int
    eval_samples: int
    input_size: int
    target_size: int
    seed: int  # of the data, not of the run

    def fingerprint(self, data_root: Path) -> None:
        """Return None: drawing the numbers is cheaper than reading them."""

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Draw both splits.

        Raises:
            UserError: a size is below 1.
        """
        shared.require_at_least(self, num_samples=1, eval_samples=1, input_size=1, target_size=1)
        generator = torch.Generator().manual_seed(self.seed)
        tensors = {}
        for split, num_samples in (("train", self.num_samples), ("eval", self.eval_samples)):
            for part, size in (("inputs", self.input_size), ("targets", self.target_size)):
                tensors[f"{split}_{part}"] = torch.randn(num_samples, size, generator=generator)
        return tensors

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset, a regression."""
        return Dataset(self.name, *splits(tensors), num_classes=None)
