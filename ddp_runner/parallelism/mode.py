"""The interface of a mode of parallelism: where a model is, and how a step is computed.

A mode is a frozen dataclass with the keys of its YAML as fields and the methods of ``Mode``. Most
inherit what they share from ``Single``. The loop is the same for all modes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Status

StateT = TypeVar("StateT")  # a ``TrainState``, which this package must not import
BatchT = TypeVar("BatchT")  # this rank's ``StepBatch``


@dataclass(frozen=True)
class Layout:
    """The part of a run that one rank has."""

    share: int  # index of its part of each global batch, from 0; of the first, if it has several
    num_shares: int  # parts of a global batch; their gradients are averaged
    env: DistEnv  # its rank among the loop's ranks; outside the loop, among all ranks
    runs_loop: bool = True  # runs the training loop, evaluates and saves
    computes_batches: bool = True  # runs forward and backward of its share
    model_ranks: int = 1  # neighbouring ranks that compute a share together
    shares_per_rank: int = 1  # neighbouring shares; several with virtual ranks
    # A forward waits for the other ranks, so all must evaluate the same number of batches.
    forward_is_collective: bool = False
    backward_is_collective: bool = True  # with several ranks; False: the engine reduces gradients
    has_stages: bool = False  # the ranks of a share have different layers, not parts of each

    @property
    def sends_batch_numbers(self) -> bool:
        """Whether ranks outside the loop compute its batches, which they get by their numbers."""
        return not (self.runs_loop and self.computes_batches)

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether a backward waits for the other ranks once, when it averages the gradients."""
        waits_once = self.backward_is_collective and not self.forward_is_collective
        return waits_once and self.env.world_size > 1

    @property
    def eval_share(self) -> tuple[int, int]:
        """The index of a rank's share of an evaluation, and the number of shares."""
        return self.env.rank // self.model_ranks, self.env.world_size // self.model_ranks

    @property
    def eval_shares(self) -> tuple[range, int]:
        """The shares of a rank that evaluates as many as it trains, and the number of shares."""
        size, (share, num_shares) = self.shares_per_rank, self.eval_share
        return range(share * size, (share + 1) * size), num_shares * size


@dataclass
class Sums:
    """This rank's parts of a step's results; the sum over the loop's ranks is the whole.

    The losses are added up when somebody reads ``loss``: few steps are logged.
    """

    losses: list[Tensor]  # of the micro-batches: parts of the mean over the global batch, scalars
    # Tokens of the global batch on this rank: the loop turns means over samples into means over
    # tokens. None when the loss counts samples.
    tokens: Tensor | None
    scalars: dict[str, Tensor]  # the training step's scalars by name, averaged as the loss
    grad_norm: Tensor | None = None  # norm of the whole gradient before clipping, if computed

    @property
    def loss(self) -> Tensor:
        """Part of the mean over the global batch, a scalar."""
        return sum(self.losses, start=torch.zeros(()))


class Engine(ABC, Generic[StateT, BatchT]):
    """Computes a rank's steps."""

    @abstractmethod
    def backward(self, state: StateT, batch: BatchT) -> Sums:
        """Leave a step's gradients, averaged over the shares, in the module. Collective."""

    def may_stop(self, is_asked: bool) -> bool:
        """Return whether the loop stops now; `is_asked`: a stop was requested."""
        return is_asked

    def serve(self, state: StateT) -> Status | None:
        """Compute for another rank's loop until the run ends, and return its status.

        None: this rank runs the loop.
        """
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return the mode's metrics of the steps since the last call."""
        return {}

    def close(self, status: Status) -> None:
        """Tell the ranks outside the loop the run's status."""


@runtime_checkable
class Mode(Protocol):
    """Places the model and computes its steps."""

    def layout(self, env: DistEnv) -> Layout:
        """Return this rank's part of a run."""

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model on the devices; with several, ``build`` takes them as dev0, dev1, ..."""

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the module that the loop trains. Collective: every rank must call."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce this rank's gradients."""

    def engine(self, state: StateT, local: Engine[StateT, BatchT]) -> Engine[StateT, BatchT]:
        """Return this rank's engine. Collective: every rank must call.

        It is called once, after a checkpoint has been loaded and before the first step. `local`
        computes this rank's share of a step, with ``no_sync`` and the model of ``wrap``.
        """


def one_share_for(env: DistEnv, model_ranks: int | None) -> Layout:
    """Return the layout of a mode with a share for each `model_ranks` neighbours; None: for all."""
    size = model_ranks or env.world_size
    return Layout(
        share=env.rank // size,
        num_shares=env.world_size // size,
        env=env,
        model_ranks=size,
        forward_is_collective=True,
    )


def local_engine(state: StateT, local: Engine[StateT, BatchT]) -> Engine[StateT, BatchT]:
    """Return the local engine, for modes whose backward already averages the gradients."""
    return local


def no_wrapper(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Return the module unchanged."""
    return module


def rank_devices(env: DistEnv, *, kind: str, per_rank: int) -> tuple[torch.device, ...]:
    """Return the ``per_rank`` devices of local rank r, from number r * per_rank.

    A rank that sees only its own GPUs, as when Slurm binds them, counts from 0. On the CPU all
    stages share the device.
    """
    if kind == "cpu":
        return (torch.device("cpu"),) * per_rank
    first = 0 if torch.accelerator.device_count() == per_rank else env.local_rank * per_rank
    return tuple(torch.device(kind, first + stage) for stage in range(per_rank))


def count_devices(env: DistEnv, devices: Sequence[torch.device], *, data_parallel: bool) -> int:
    """Return the devices of all ranks, given this rank's; a rank on the CPU counts as 1.

    With `data_parallel` a rank uses every GPU that it sees.
    """
    if devices[0].type == "cpu":
        return env.world_size
    return env.world_size * (torch.accelerator.device_count() if data_parallel else len(devices))
