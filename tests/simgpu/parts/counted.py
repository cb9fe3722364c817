"""A training step that notes how often the host has waited, and a user's own datasets."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.train.step import Step, supervised


def step(model: nn.Module, batch: Any, *, loss: Any, count: str) -> Step:
    """Return the ordinary step, and note the waits before it where a test asks for them."""
    if path := os.environ.get("COUNTED_WAITS"):
        import simgpu

        line = {"training": model.training, "waits": simgpu.waits()}
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
