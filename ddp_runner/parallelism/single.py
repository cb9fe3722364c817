"""A process with a device: the reference that every other mode is compared with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import Role, count_devices, rank_devices, same_role


@dataclass(frozen=True)
class Single:
    """An unwrapped model on a device."""

    name: str

    def role(self, env: DistEnv) -> Role:
        """Return the same role for every rank."""
        return same_role(env)

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the rank's device."""
        return rank_devices(env, kind=kind)

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return 1, since there is only one rank."""
        return count_devices(env, kind=kind)

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model and move it to its device."""
        return build().to(devices[0])

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Return the model unchanged."""
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: there is no other rank to reduce with."""
        return nullcontext()
