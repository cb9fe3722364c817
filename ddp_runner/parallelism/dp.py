"""DataParallel: one process that scatters each batch over the visible GPUs and gathers outputs.

Kept for comparison: PyTorch recommends DDP even on one machine
(https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
"""

from dataclasses import dataclass

import torch
from torch import nn

from ddp_runner.environment import DistEnv
from ddp_runner.parallelism import OneDevice


@dataclass(frozen=True)
class DataParallelMode(OneDevice):
    """``torch.nn.DataParallel``; with fewer than two GPUs it runs as one device."""

    max_ranks: int
    data_parallel: bool

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return every visible GPU, or the CPU."""
        if kind == "cpu":
            return (torch.device("cpu"),)
        return tuple(torch.device(kind, index) for index in range(torch.cuda.device_count()))

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Replicate the model at each forward, on as many devices as there are."""
        if len(devices) < 2:
            return module
        return nn.DataParallel(module, device_ids=[device.index for device in devices])
