"""The forms of parallelism, one file each: how a model is placed, wrapped and stepped.

A mode is a frozen dataclass whose fields are the keys of its YAML and whose methods are those of
``Mode``. The training loop is the same for all of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from ddp_runner.environment import DistEnv


class Mode(Protocol):
    """What the worker asks of a mode."""

    @property
    def name(self) -> str:
        """The name of the mode's YAML."""

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the devices of this rank's replica, first stage first; kind is cpu or cuda."""

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model with its parameters on the devices."""

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Return what the loop calls. Collective for modes of several ranks: every rank."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward leaves the gradients of this rank unreduced."""


def rank_devices(env: DistEnv, *, kind: str, per_rank: int = 1) -> tuple[torch.device, ...]:
    """Return local rank r's block of devices: per_rank of them, from r * per_rank on.

    On the CPU every "device" is the same one, so that a replica of two stages runs there too.
    """
    if kind == "cpu":
        return (torch.device("cpu"),) * per_rank
    first = env.local_rank * per_rank
    return tuple(torch.device(kind, first + stage) for stage in range(per_rank))
