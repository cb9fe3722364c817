"""The two linear layers of PyTorch's DDP tutorial, whole or split over two devices.

Source: https://pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ToyModel(nn.Module):
    """Linear(10, 10), ReLU, Linear(10, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def stage0(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to hidden activations (batch, 10)."""
        hidden: Tensor = self.relu(self.net1(inputs))
        return hidden

    def stage1(self, hidden: Tensor) -> Tensor:
        """Map hidden activations (batch, 10) to outputs (batch, 5)."""
        outputs: Tensor = self.net2(hidden)
        return outputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        return self.stage1(self.stage0(inputs))


class ToyMpModel(ToyModel):
    """`ToyModel` with the first linear layer on ``dev0`` and the second on ``dev1``.

    It has the parameter names, initial weights and outputs of `ToyModel`. Targets are on ``dev1``.
    """

    def __init__(self, *, dev0: torch.device, dev1: torch.device) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1.to(dev0)
        self.net2.to(dev1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) on any device to (batch, 5) on ``dev1``."""
        return self.stage1(self.stage0(inputs.to(self.dev0)).to(self.dev1))


class SlowToyModel(ToyModel):
    """`ToyModel` that sleeps in training step `slow_step`, from 1, on rank `slow_rank`.

    It shows how a slow rank affects the other ranks.
    """

    def __init__(self, *, slow_rank: int, slow_step: int, delay_s: float) -> None:
        super().__init__()
        self.slow_rank, self.slow_step, self.delay_s = slow_rank, slow_step, delay_s
        self.steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5), after a sleep in the slow step."""
        self.steps += self.training
        is_due = self.training and self.steps == self.slow_step
        if is_due and dist.is_initialized() and dist.get_rank() == self.slow_rank:
            time.sleep(self.delay_s)
        return super().forward(inputs)
