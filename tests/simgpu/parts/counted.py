"""A training step that notes how often the host has waited, and a user's own data and model."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.data import dataset
from ddp_runner.data.splits import TensorSplit
from ddp_runner.train.step import StepOutput, supervised


def step(model: nn.Module, batch: Any, *, loss: Any, count: str) -> StepOutput:
    """Return the ordinary step, and note the waits before it where a test asks for them."""
    if path := os.environ.get("COUNTED_WAITS"):
        import simgpu

        line = {
            "training": model.training,
            "waits": simgpu.waits(),
            "pageable": simgpu.copies().get("pageable h2d", 0),
        }
        with Path(f"{path}.{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return supervised(model, batch, loss=loss, count=count)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures (1, 28, 28) of noise around ten brightnesses, the classes."""

    def __init__(self, *, num_samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(10, (num_samples,), generator=generator)
        self.noise = torch.rand(num_samples, 1, 28, 28, generator=generator)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self.classes[index])
        return self.noise[index] + label / 10, label


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 16 tokens, each with its neighbour as target."""

    def __init__(self, *, num_samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(64, (num_samples, 17), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


@dataclass(frozen=True)
class Padded:
    """A source of texts of up to 12 tokens, filled up with 0, in memory."""

    name: str
    num_classes: int

    def open(self, data_root: Path) -> dataset.Dataset:
        """Return the same texts each time."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 64, (120, 12), generator=generator)
        lengths = torch.randint(3, 12, (120, 1), generator=generator)
        tokens[torch.arange(12) >= lengths] = 0
        labels = tokens[:, 0] % self.num_classes
        splits = (TensorSplit(tokens[rows], labels[rows]) for rows in (slice(96), slice(96, 120)))
        return dataset.Dataset(self.name, *splits, num_classes=self.num_classes, padding_id=0)


class Bag(nn.Module):
    """A classifier of texts by the sum of their tokens' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16, padding_idx=0), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, 4) of tokens (batch, length)."""
        logits: Tensor = self.head(self.embedding(tokens).sum(dim=1))
        return logits
