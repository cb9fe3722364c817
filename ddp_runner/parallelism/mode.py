"""The forms of parallelism, one file each: how a model is placed, wrapped and stepped.

A mode is a frozen dataclass whose fields are the keys of its YAML and whose methods are those of
``Mode``. The training loop is the same for all of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart


class GradientSource(Protocol):
    """Where a step's gradients come from: this rank's own backward, or ranks that serve it."""

    @property
    def lost(self) -> Collection[int]:
        """Ranks that died while the run went on."""

    def compute(self, state: Any, batch: Any) -> Tensor:
        """Leave a step's gradients in the module; return this rank's part of the mean loss.

        Args:
            state: the loop's TrainState, which this package does not import.
            batch: this rank's part of the step, with its ``number``.
        """

    def outstanding(self, state: Any) -> tuple[int, ...]:
        """Return the batches before the state's position whose gradients were never applied."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the steps since the last call."""

    def close(self, status: Status) -> None:
        """Tell the ranks that serve the loop how the run ended."""


@dataclass(frozen=True)
class Duties:
    """What the loop needs from a mode in which some ranks serve it."""

    module: nn.Module
    first_step: int  # number of the batch with which this session begins
    num_steps: int  # that the loop will take
    outstanding: Sequence[int]  # batches to compute before any new one
    compute: Callable[[int], Tensor]  # leaves the gradients of a batch, by its number; its loss
    seed: int
    timeout_s: float  # a rank that is silent for so long counts as lost
    ended: Callable[[], Collection[int]]  # ranks whose processes are known to have ended
    mark: Callable[[StepPart], None]  # counts the time of a step up to now for a part
    log: Callable[[str], None]


@dataclass(frozen=True)
class Role:
    """What one rank does in a run."""

    share: int  # which part of each global batch it computes ...
    num_shares: int  # ... of so many, whose gradients are averaged
    loop: DistEnv | None  # its place among the ranks of the training loop; None: it serves them
    # Where some ranks serve the loop: how it gets their gradients, and how they serve it to its
    # end. Collective: every rank calls one of the two.
    gradients: Callable[[Duties], GradientSource] | None = None
    serve: Callable[[Duties], Status] | None = None


def same_role(env: DistEnv) -> Role:
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
