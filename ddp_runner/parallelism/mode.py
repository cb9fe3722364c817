"""The forms of parallelism, one file each: how a model is placed, wrapped and stepped.

A mode is a frozen dataclass whose fields are the keys of its YAML and whose methods are those of
``Mode``. The training loop is the same for all of them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp_runner.dist_env import DistEnv


@dataclass(frozen=True)
class Role:
    """What one rank does in the gang."""

    share: int  # which part of each global batch it computes ...
    num_shares: int  # ... of so many, whose gradients are averaged
    loop: DistEnv | None  # its place among the ranks of the training loop; None: it serves them
    serving: "Serving | None" = None  # how, in a mode where some ranks serve the loop


class Gradients(Protocol):
    """The loop's side of ranks that compute gradients for it."""

    @property
    def lost(self) -> list[int]:
        """Ranks that died while the run went on."""

    def collect(self, *, step: int) -> Tensor:
        """Leave the gradients of a step in the module; return the mean loss over its samples."""

    def outstanding(self) -> tuple[int, ...]:
        """Return the batches before the newest one whose gradients have not been collected."""

    def figures(self) -> dict[str, float]:
        """Return metrics of the steps since the last call."""

    def close(self, status: str) -> None:
        """Tell those ranks how the run ended."""


class Serving(Protocol):
    """Both sides of a mode in which some ranks serve the loop."""

    def connect(self, env: DistEnv, *, timeout_s: float) -> Sequence[ProcessGroup]:
        """Return this rank's links between the two sides. Collective: every rank must call."""

    def serve(
        self,
        module: nn.Module,
        links: Sequence[ProcessGroup],
        *,
        num_steps: int,
        outstanding: Sequence[int],
        timeout_s: float,
        ended: Callable[[], Collection[int]],
        log: Callable[[str], None],
    ) -> Gradients:
        """Return the loop's side.

        Args:
            module: whose gradients are collected.
            links: from `connect`.
            num_steps: how many steps will be taken.
            outstanding: batches to compute before any new one.
            timeout_s: after so long without a message a rank counts as lost.
            ended: tells which ranks' processes are known to have ended.
            log: takes a line for the user.
        """

    def follow(
        self,
        module: nn.Module,
        links: Sequence[ProcessGroup],
        *,
        seed: int,
        compute: Callable[[int], Tensor],
    ) -> str:
        """Serve the loop to its end; return the run's status."""


def alike(env: DistEnv) -> Role:
    """Return the role of a rank where all ranks do the same."""
    return Role(share=env.rank, num_shares=env.world_size, loop=env)


@runtime_checkable
class Mode(Protocol):
    """What the worker asks of a mode."""

    @property
    def name(self) -> str:
        """The name of the mode's YAML."""

    def role(self, env: DistEnv) -> Role:
        """Return what this rank does."""

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the devices of this rank's replica, first stage first; kind is cpu or cuda."""

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return how many devices all ranks use together; on the CPU a rank counts as one."""

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

    A rank that sees its own GPUs alone, as Slurm's binding lets it, has them from 0 on. On the CPU
    every "device" is the same one, so that a replica of two stages runs there too.
    """
    if kind == "cpu":
        return (torch.device("cpu"),) * per_rank
    first = 0 if torch.cuda.device_count() == per_rank else env.local_rank * per_rank
    return tuple(torch.device(kind, first + stage) for stage in range(per_rank))


def count_devices(env: DistEnv, *, kind: str, per_rank: int = 1) -> int:
    """Return the devices of all ranks, where each has its own: see ``rank_devices``."""
    return env.world_size * (1 if kind == "cpu" else per_rank)
