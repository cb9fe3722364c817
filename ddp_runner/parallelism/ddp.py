"""DistributedDataParallel: one replica a rank, gradients averaged while backward still runs.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.environment import DistEnv
from ddp_runner.parallelism import rank_devices


@dataclass(frozen=True)
class DDP:
    """Replicas on one device each."""

    name: str
    devices_per_rank: int
    bucket_cap_mb: float
    find_unused_parameters: bool
    static_graph: bool
    broadcast_buffers: bool
    sync_batchnorm: bool

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the one device of this rank."""
        return rank_devices(env, kind=kind)

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model and move it to this rank's device."""
        module = build()
        if self.sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return module.to(devices[0])

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Give every rank rank 0's weights and reduce gradients. Collective: every rank."""
        return DistributedDataParallel(
            module,
            device_ids=None if devices[0].type == "cpu" else [devices[0]],
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            broadcast_buffers=self.broadcast_buffers,
            gradient_as_bucket_view=True,  # saves one copy of the gradients
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's own context: the reduction waits for the next backward outside it."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()
