"""The interface of a form of parallelism: where a model is, and how a step is computed.

A mode is a frozen dataclass with the keys of its YAML as fields and the methods of ``Mode``. Where
it does what most modes do, it names a function of this module. The loop is the same for all modes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Status


@dataclass(frozen=True)
class Layout:
    """What part of a run one rank has."""

    share: int  # the part of each global batch that it computes, from 0
    num_shares: int  # parts of a global batch; their gradients are averaged
    env: DistEnv  # its place among the ranks of the loop; outside of it, among all ranks
    in_loop: bool = True  # it runs the training loop, evaluates and saves
    computes: bool = True  # forward and backward of its share
    model_ranks: int = 1  # so many neighbouring ranks compute one share together
    # A forward waits for the other ranks, so all of them must evaluate equally many batches.
    forward_is_collective: bool = False

    @property
    def by_number(self) -> bool:
        """Whether ranks outside of the loop compute for it: by the numbers of batches."""
        return not (self.in_loop and self.computes)

    @property
    def eval_share(self) -> tuple[int, int]:
        """Which part of an evaluation a rank of the loop computes, from 0, and of how many."""
        return self.env.rank // self.model_ranks, self.env.world_size // self.model_ranks


@dataclass
class Sums:
    """This rank's parts of what a step adds up: those of all ranks of the loop are the whole."""

    loss: Tensor  # of the mean over the global batch, a scalar
    # This rank's in the global batch. Gradients, loss and scalars are then those of a mean over
    # samples, and the loop makes it one over tokens. None: samples are counted.
    tokens: Tensor | None
    scalars: dict[str, Tensor]  # what the training step returned, by name, as the loss
    grad_norm: Tensor | None = None  # of the whole gradient, before clipping; None: not computed


class Engine(ABC):
    """How a rank computes a step. `state` is a TrainState, which this package does not import."""

    @abstractmethod
    def backward(self, state: Any, batch: Any) -> Sums:
        """Leave the gradients of a step, averaged over the shares, in the module. Collective.

        Args:
            state: of the loop.
            batch: this rank's part of the step, with its ``number``.
        """

    def may_stop(self, is_asked: bool) -> bool:
        """Return whether the loop stops now, given whether it is asked to."""
        return is_asked

    def serve(self, state: Any) -> Status | None:
        """Work for the loop on another rank to the end of the run, and return how it ended.

        None: this rank runs the loop.
        """
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of its own, of the steps since the last call."""
        return {}

    def close(self, status: Status) -> None:  # noqa: B027, most have nobody to tell
        """Tell the ranks outside of the loop how the run has ended."""


@runtime_checkable
class Mode(Protocol):
    """Where the model is, and what a run needs around it."""

    def layout(self, env: DistEnv) -> Layout:
        """Return what part of a run this rank has."""

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model on the devices; with several, ``build`` takes them as dev0, dev1, ..."""

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the module that the loop trains. Collective: every rank must call."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce this rank's gradients."""

    def engine(self, state: Any, local: Engine) -> Engine:
        """Return how this rank computes the steps of a state. Collective: every rank must call.

        It is called once: after a checkpoint has been loaded, and before the first step.
        `local` computes this rank's share of a step, with ``no_sync`` and the model of ``wrap``.
        """


def one_share_each(env: DistEnv) -> Layout:
    """Return the layout of a rank in a mode in which all ranks do the same."""
    return Layout(share=env.rank, num_shares=env.world_size, env=env)


def local_engine(state: Any, local: Engine) -> Engine:
    """Return the rank's own engine, for a mode whose backward reduces gradients, or needs not."""
    return local


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
