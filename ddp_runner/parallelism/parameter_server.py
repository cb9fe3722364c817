"""A parameter server: rank 0 holds the parameters, the other ranks compute gradients for it.

A trainer receives the parameters, computes the gradients of a batch and sends them; the server
takes the optimizer's step. The server runs the training loop: where other modes call backward, it
collects gradients. Messages are point-to-point, on CPU tensors.

Each batch's gradients are applied exactly once. In async they are applied as they arrive, so two
runs with the same seed differ. Before a save, an evaluation or a stop the server waits until no
trainer has a batch.

Sources: https://pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html, whose RPC
transport torch no longer develops; for sync and async, Dean et al., Large Scale Distributed Deep
Networks (2012).
"""

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Engine, Layout, Sums
from ddp_runner.parallelism.single import Single
from ddp_runner.seeds import seed_all

SERVER = 0
STATUS_OF = {-1: Status.COMPLETED, -2: Status.PREEMPTED}  # sent instead of a batch's number
FOREVER = timedelta(days=365)  # the server may evaluate for longer than backend.timeout_s
EXACT_IN_FLOAT32 = {
    torch.float32, torch.bfloat16, torch.float16,
    torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class ParameterServer(Single):
    """A server and its trainers; a step waits for all trainers in sync, for any in async.

    The parameters come with each batch, and a trainer sends gradients after its last micro-batch.
    """

    mode: str

    def layout(self, env: DistEnv) -> Layout:
        """Return the server's or a trainer's part; in async a trainer computes global batches."""
        num_shares = env.world_size - 1 if self.mode == "sync" else 1
        if env.rank == SERVER:
            alone = replace(env, world_size=1, local_world_size=1)
            return Layout(0, num_shares, alone, computes_batches=False)
        return Layout((env.rank - 1) % num_shares, num_shares, env, runs_loop=False)

    def engine(self, state: Any, local: Engine[Any, Any]) -> "Server | Trainer":
        """Return the server, or a trainer. Collective: every rank must call."""
        seconds = state.work.config.backend.timeout_s
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        assert isinstance(group, dist.ProcessGroup)
        if state.work.layout.runs_loop:
            return Server(state, group, waits_for_all=self.mode == "sync")
        return Trainer(local, group)


class Trainer(Engine[Any, Any]):
    """Computes gradients for the server; see ``Engine``."""

    def __init__(self, local: Engine[Any, Any], group: dist.ProcessGroup) -> None:
        self._local, self._group = local, group

    def backward(self, state: Any, batch: Any) -> Sums:
        """Compute this rank's share."""
        return self._local.backward(state, batch)

    def serve(self, state: Any) -> Status:
        """Compute the server's batches until the run ends; return its status.

        Raises:
            UserError: a gradient is sparse.
        """
        module, batches = state.module, state.batches
        number, values = torch.zeros(1).long(), flatten_state(module)
        pushed_at = time.perf_counter()
        while True:
            work = dist.irecv(number, src=SERVER, group=self._group)
            assert work is not None
            work.wait(FOREVER)
            if (step := int(number)) in STATUS_OF:
                return STATUS_OF[step]
            dist.recv(values, src=SERVER, group=self._group)
            copy_parts(values, [*module.parameters(), *module.buffers()])
            waited_s = time.perf_counter() - pushed_at
            module.zero_grad(set_to_none=True)
            seed_all(batches.seed, "step", step, batches.share)
            batch = batches.step_at(step)
            sums = self.backward(state, batch)
            if any(p.grad is not None and p.grad.is_sparse for p in module.parameters()):
                raise UserError(
                    "parallelism=ps cannot push sparse gradients",
                    "leave out sparse=True in the model, or write parallelism=ddp",
                )
            # Per sample, since the last batch of an epoch may be smaller than the server's.
            tokens = 0.0 if sums.tokens is None else float(sums.tokens) / batch.global_count
            numbers = [waited_s, float(sums.loss), tokens, *map(float, sums.scalars.values())]
            push = flatten_gradients(module, torch.tensor(numbers, dtype=torch.float64))
            dist.send(push, dst=SERVER, group=self._group)
            pushed_at = time.perf_counter()


class Server(Engine[Any, Any]):
    """Collects gradients from all trainers or from any; see ``Engine``."""

    def __init__(self, state: Any, group: dist.ProcessGroup, *, waits_for_all: bool) -> None:
        self._module, self._group = state.module, group
        self._waits_for_all, self._scalars = waits_for_all, tuple(state.scalars or ())
        self._idle = list(range(1, dist.get_world_size(group)))
        self._version, self._versions = 0, dict[int, int]()  # updates so far; per busy trainer
        self._next, self._is_stopping = 0, False  # the next batch to hand out
        self._parameters = list(state.module.parameters())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        # Length and dtype of a push, without memory; and the lengths of its four parts.
        numbers = torch.zeros(3 + len(self._scalars))
        self._push = flatten_gradients(state.module, numbers).to("meta")
        num_buffered = sum(buffer.numel() for buffer in state.module.buffers())
        self._lengths = [sum(self._sizes), len(self._sizes), num_buffered, len(numbers)]
        self._begin_interval()

    def backward(self, state: Any, batch: Any) -> Sums:
        """Leave a step's gradients in the module.

        In sync the trainers compute the loop's batch; in async they already have batches.
        """
        if not self._num_steps:
            self._began = time.perf_counter()
        pushes = self._collect(state, batch.number)
        total = sum(pushes[1:], start=pushes[0])
        gradients, counts, _, numbers = total.split(self._lengths)
        gradients = (gradients / len(pushes)).split(self._sizes)
        pairs = zip(self._parameters, gradients, counts.tolist(), strict=True)
        for parameter, gradient, count in pairs:
            # None, not zero: with a zero gradient the optimizer would decay a frozen parameter.
            parameter.grad = gradient.view(parameter.shape).to(parameter) if count else None
        # The lowest rank's buffers, as under DDP.
        copy_parts(pushes[0].split(self._lengths)[2], list(self._module.buffers()))
        waited_s, loss, tokens, *scalars = numbers
        self._version += 1
        self._num_steps += 1
        self._trainer_wait_s += float(waited_s)
        state.timer.mark(StepPart.COLLECT)
        has_tokens = state.work.config.batch.count == "tokens"
        num_tokens = tokens * batch.global_count if has_tokens else None
        return Sums([loss], num_tokens, dict(zip(self._scalars, scalars, strict=True)))

    def may_stop(self, is_asked: bool) -> bool:
        """Return whether to stop now: if requested, once no trainer has a batch."""
        self._is_stopping = is_asked
        return is_asked and not self._versions

    def metrics(self) -> dict[str, float]:
        """Return staleness (in updates), waiting times and pushes since the last call."""
        pushes = len(self._staleness)
        metrics = {
            "ps/staleness_mean": sum(self._staleness) / pushes,
            "ps/staleness_max": max(self._staleness),
            "ps/trainer_wait_ms": 1000 * self._trainer_wait_s / pushes,
            "ps/server_wait_ms": 1000 * self._server_wait_s / self._num_steps,
            "ps/pushes_per_s": pushes / (time.perf_counter() - self._began),
            "ps/num_trainers": len(self._idle) + len(self._versions),
        }
        self._begin_interval()
        return metrics

    def _begin_interval(self) -> None:
        self._began = time.perf_counter()
        self._num_steps: int = 0
        self._staleness: list[int] = []
        self._trainer_wait_s: float = 0.0
        self._server_wait_s: float = 0.0

    def close(self, status: Status) -> None:
        """Send the trainers the run's status."""
        (code,) = (code for code, name in STATUS_OF.items() if name == status)
        for rank in self._idle:
            dist.send(torch.tensor([code]), rank, self._group)

    def _collect(self, state: Any, number: int) -> list[Tensor]:
        """Hand out batches to idle trainers; return a step's pushes, in sync by rank."""
        if self._waits_for_all:
            numbers = [number] * len(self._idle)
        else:
            self._next = max(self._next, number)
            ahead = 0 if self._is_stopping else state.steps_ahead(number)
            numbers = list(range(self._next, number + ahead))[: len(self._idle)]
            self._next += len(numbers)
        trainers, self._idle = self._idle[: len(numbers)], self._idle[len(numbers) :]
        self._versions |= dict.fromkeys(trainers, self._version)
        values = flatten_state(self._module)
        started = time.perf_counter()
        for rank, batch_number in zip(trainers, numbers, strict=True):
            dist.send(torch.tensor([batch_number]), rank, self._group)
            dist.send(values, rank, self._group)
        sources = trainers if self._waits_for_all else [None]
        pushes = [torch.empty_like(self._push, device="cpu") for _ in sources]
        senders = [
            dist.recv(push, src=source, group=self._group)
            for push, source in zip(pushes, sources, strict=True)
        ]
        self._server_wait_s += time.perf_counter() - started
        self._staleness += [self._version - self._versions.pop(rank) for rank in senders]
        self._idle += senders
        return pushes


def flatten_state(module: nn.Module) -> Tensor:
    """Return the parameters and the buffers as one vector on the CPU."""
    return _flatten([*module.parameters(), *module.buffers()], module)


def flatten_gradients(module: nn.Module, numbers: Tensor) -> Tensor:
    """Return a trainer's push, a vector on the CPU.

    It holds the gradients; for each parameter 1 if it has a gradient, else 0; buffers; `numbers`.
    """
    parameters = list(module.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters])
    return _flatten([*gradients, has_gradient, *module.buffers(), numbers], module)


@torch.no_grad()
def copy_parts(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy the parts of a vector into tensors."""
    parts = values.split([tensor.numel() for tensor in tensors]) if tensors else ()
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def _flatten(tensors: list[Tensor], module: nn.Module) -> Tensor:
    """Return a vector of float32, or of float64 if float32 would round a value of the model."""
    sent = (*module.named_parameters(), *module.named_buffers())
    is_wide = any(
        tensor.dtype not in EXACT_IN_FLOAT32
        # float32 holds BatchNorm's count of batches exactly up to 2**24.
        and not name.endswith("num_batches_tracked")
        for name, tensor in sent
    )
    dtype = torch.float64 if is_wide else torch.float32
    return torch.cat([tensor.detach().to("cpu", dtype).reshape(-1) for tensor in tensors])
