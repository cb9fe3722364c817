"""The interface of a form of parallelism: how it places, wraps and steps a model.

A mode is a frozen dataclass with the keys of its YAML as fields and the methods of ``Mode``. Where
it does what most modes do, it names a function of this module. The loop is the same for all modes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart


class GradientSource(Protocol):
    """Where a step's gradients come from: this rank's backward, or other ranks."""

    def compute(self, state: Any, batch: Any) -> Tensor:
        """Leave a step's gradients in the module, and its scalars in the state.

        Args:
            state: the loop's TrainState, which this package does not import.
            batch: this rank's part of the step, with its ``number``.

        Returns:
            This rank's part of the mean loss, a scalar.
        """

    def may_stop(self, is_asked: bool) -> bool:
        """Return whether the loop stops now, given whether it is asked to."""

    def metrics(self) -> Mapping[str, float]:
        """Return the source's own metrics of the steps since the last call."""

    def close(self, status: Status) -> None:
        """Send the run's status to the ranks that compute for the loop."""


@dataclass(frozen=True)
class Duties:
    """What the ranks need if some of them compute gradients for the loop."""

    module: nn.Module
    compute: Callable[[int], Tensor]  # (batch number) -> loss; leaves the gradients
    # (batch number) -> how many steps from it on come before the next save or evaluation
    steps_ahead: Callable[[int], int]
    timeout_s: float  # how long a rank waits for another one's gradients
    mark: Callable[[StepPart], None]  # adds the time since the last mark to a part
    # Of the batch computed last: this rank's part of the tokens of a mean sample, by whose sum the
    # loop divides, or 0 if samples are counted; then its parts of the training step's scalars.
    sums: Callable[[], Sequence[float]] = lambda: [0.0]
    scalars: Sequence[str] = ()  # their names


@dataclass(frozen=True)
class Role:
    """What one rank does in a run."""

    share: int  # the part of each global batch that it computes, from 0
    num_shares: int  # parts of a global batch; their gradients are averaged
    loop: DistEnv | None  # its place among the ranks of the loop; None if it serves them
    model_ranks: int = 1  # so many neighbouring ranks compute one share together
    # A forward waits for the other ranks, so all of them must evaluate equally many batches.
    has_collective_forward: bool = False
    # Only if some ranks serve the loop: how the loop gets their gradients, and how they compute
    # them until it ends. Collective: every rank calls one of the two.
    gradients: Callable[[Duties], GradientSource] | None = None
    serve: Callable[[Duties], Status] | None = None

    @property
    def eval_share(self) -> tuple[int, int]:
        """Which part of an evaluation a rank of the loop computes, from 0, and of how many."""
        assert self.loop is not None
        return self.loop.rank // self.model_ranks, self.loop.world_size // self.model_ranks


@runtime_checkable
class Mode(Protocol):
    """What a run needs of a mode."""

    def role(self, env: DistEnv) -> Role:
        """Return what this rank does in a run."""

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model on the devices; with several, ``build`` takes them as dev0, dev1, ..."""

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the module that the loop trains. Collective: every rank must call."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce this rank's gradients."""


def same_role(env: DistEnv) -> Role:
    """Return the role of a rank in a mode in which all ranks do the same."""
    return Role(share=env.rank, num_shares=env.world_size, loop=env)


def place_on_first(build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
    """Build the model and move it to the rank's first device."""
    return build().to(devices[0])


def unwrapped(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Return the module unchanged."""
    return module


def no_context(model: nn.Module) -> AbstractContextManager[None]:
    """Return an empty context, for a mode whose backward never reduces over ranks."""
    return nullcontext()


def rank_devices(env: DistEnv, *, kind: str, per_rank: int) -> tuple[torch.device, ...]:
    """Return the devices of local rank r: ``per_rank`` of them, from number r * per_rank.

    A rank that sees only its own GPUs, as when Slurm binds them, counts from 0. On the CPU all
    stages share the same device, so a model of several stages runs there too.
    """
    if kind == "cpu":
        return (torch.device("cpu"),) * per_rank
    first = 0 if torch.accelerator.device_count() == per_rank else env.local_rank * per_rank
    return tuple(torch.device(kind, first + stage) for stage in range(per_rank))


def count_devices(env: DistEnv, own: Sequence[torch.device], *, data_parallel: bool) -> int:
    """Return how many devices all ranks use; a rank on the CPU counts as one.

    Args:
        env: this rank's place.
        own: this rank's devices.
        data_parallel: a rank drives every GPU that it sees.
    """
    if own[0].type == "cpu":
        return env.world_size
    return env.world_size * (torch.accelerator.device_count() if data_parallel else len(own))
