"""DDP over replicas that are cut into stages: rank r owns the devices from r * stages on.

Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html (combining DDP with model
parallelism).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.ddp import replicate
from ddp_runner.parallelism.mode import Role, alike, count_devices, rank_devices


@dataclass(frozen=True)
class DDPModelParallel:
    """Replicas of two stages, each stage on its own device."""

    name: str
    devices_per_rank: int
    bucket_cap_mb: float
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool

    def role(self, env: DistEnv) -> Role:
        """Return the same role for every rank."""
        return alike(env)

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return this rank's block of devices, one a stage."""
        return rank_devices(env, kind=kind, per_rank=self.devices_per_rank)

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return the stages of all replicas."""
        return count_devices(env, kind=kind, per_rank=self.devices_per_rank)

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model, which puts its own stages on the devices."""
        return build(**{f"dev{stage}": device for stage, device in enumerate(devices)})

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Reduce gradients between replicas. Collective: every rank must call."""
        # Neither device_ids nor output_device: the module moves its own activations.
        return replicate(
            module,
            forward_sync_buffers=self.forward_sync_buffers,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's own context: the reduction waits for the next backward outside it."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()
