"""DataParallel: one process that scatters each batch over the visible GPUs and gathers outputs.

Kept for comparison: PyTorch recommends DDP even on one machine
(https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ddp_runner.environment import DistEnv
from ddp_runner.parallelism import Role, alike


@dataclass(frozen=True)
class DataParallelMode:
    """``torch.nn.DataParallel``; with fewer than two GPUs it runs as one device."""

    name: str
    devices_per_rank: int
    max_ranks: int
    data_parallel: bool

    def role(self, env: DistEnv) -> Role:
        """Return the same role for every rank."""
        return alike(env)

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return every visible GPU, or the CPU."""
        if kind == "cpu":
            return (torch.device("cpu"),)
        return tuple(torch.device(kind, index) for index in range(torch.cuda.device_count()))

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return how many GPUs share each batch, or 1."""
        return 1 if kind == "cpu" else torch.cuda.device_count()

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model on the first device, where the outputs are gathered too."""
        return build().to(devices[0])

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Replicate the model at each forward, on as many devices as there are."""
        if len(devices) < 2:
            return module
        return nn.DataParallel(module, device_ids=[device.index for device in devices])

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: gradients are summed inside backward itself."""
        return nullcontext()
