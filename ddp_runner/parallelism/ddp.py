"""DistributedDataParallel: one replica a rank, gradients averaged while backward still runs.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import Role, alike, count_devices, rank_devices


@dataclass(frozen=True)
class DDP:
    """Replicas on one device each."""

    name: str
    bucket_cap_mb: float
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool
    sync_batchnorm: bool

    def role(self, env: DistEnv) -> Role:
        """Return the same role for every rank."""
        return alike(env)

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the one device of this rank."""
        return rank_devices(env, kind=kind)

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return one device a rank."""
        return count_devices(env, kind=kind)

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
        device_ids = None if devices[0].type == "cpu" else [devices[0]]
        return replicate(
            module,
            device_ids=device_ids,
            forward_sync_buffers=self.forward_sync_buffers,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's own context: the reduction waits for the next backward outside it."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()


def replicate(module: nn.Module, *, forward_sync_buffers: bool, **settings: Any) -> nn.Module:
    """Return the module under DDP, whatever the version calls its settings. Collective.

    Args:
        module: on its devices.
        forward_sync_buffers: broadcast rank 0's buffers before each forward.
        settings: further arguments of DistributedDataParallel.
    """
    parameters = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    settings[name] = forward_sync_buffers
    # gradient_as_bucket_view saves one copy of the gradients.
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **settings)
