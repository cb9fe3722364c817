"""A parameter server: rank 0 holds the parameters, the others compute gradients for it.

A trainer receives the parameters, computes the gradients of a batch and sends them; the server
takes the optimizer's step. The server runs the training loop: where other modes call backward, it
collects gradients. Messages are torch.distributed's point-to-point ones, on CPU tensors.

Each batch's gradients are applied exactly once. In async they are applied as they arrive, so two
runs with the same seed differ; before a save, an evaluation or a stop the server hands out no more,
so that no batch is then under way.

Sources: https://pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html, whose RPC
transport torch no longer develops; for sync and async, Dean et al., Large Scale Distributed Deep
Networks (2012).
"""

import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Duties, Role, no_context, place_on_first, unwrapped

SERVER = 0
STATUS_OF = {-1: Status.COMPLETED, -2: Status.PREEMPTED}  # sent in place of a batch's number
FOREVER = timedelta(days=365)  # the server may evaluate for longer than backend.timeout_s
EXACT_IN_FLOAT32 = {
    torch.float32, torch.bfloat16, torch.float16,
    torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class ParameterServer:
    """A server and its trainers; in sync a step waits for all trainers, in async for any."""

    name: str
    mode: str
    place = staticmethod(place_on_first)
    wrap = staticmethod(unwrapped)  # the parameters come with each batch
    no_sync = staticmethod(no_context)  # a trainer sends gradients after its last micro-batch

    def role(self, env: DistEnv) -> Role:
        """Return the role of server or trainer; in async a trainer computes global batches."""
        num_shares = env.world_size - 1 if self.mode == "sync" else 1
        if env.rank == SERVER:
            loop = replace(env, world_size=1, local_world_size=1)
            return Role(share=0, num_shares=num_shares, loop=loop, gradients=self.start_server)
        share = (env.rank - 1) % num_shares
        return Role(share=share, num_shares=num_shares, loop=None, serve=self.run_trainer)

    def start_server(self, duties: Duties) -> "Server":
        """Return the loop's source of gradients. Collective with ``run_trainer``."""
        return Server(duties, _connect(duties), waits_for_all=self.mode == "sync")

    def run_trainer(self, duties: Duties) -> Status:
        """Compute gradients to the end of the run; return its status. Collective with the server.

        Raises:
            UserError: no parameter has a gradient.
        """
        group, module = _connect(duties), duties.module
        number, values = torch.zeros(1).long(), flatten_state(module)
        pushed_at = time.perf_counter()
        while True:
            work = dist.irecv(number, src=SERVER, group=group)
            assert work is not None
            work.wait(FOREVER)
            if (step := int(number)) in STATUS_OF:
                return STATUS_OF[step]
            dist.recv(values, src=SERVER, group=group)
            copy_parts(values, [*module.parameters(), *module.buffers()])
            waited_s = time.perf_counter() - pushed_at
            module.zero_grad(set_to_none=True)
            loss = duties.compute(step)
            if all(parameter.grad is None for parameter in module.parameters()):
                raise UserError(
                    "no parameter of the model has a gradient; there is nothing to push"
                )
            if any(one.grad is not None and one.grad.is_sparse for one in module.parameters()):
                raise UserError(
                    f"parallelism={self.name} cannot push sparse gradients; leave out sparse=True "
                    "in the model, or write parallelism=ddp"
                )
            numbers = torch.tensor([waited_s, float(loss), *duties.sums()], dtype=torch.float64)
            dist.send(flatten_gradients(module, numbers), dst=SERVER, group=group)
            pushed_at = time.perf_counter()


@dataclass
class _Interval:
    """Measurements since the last line of metrics."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    staleness: list[int] = field(default_factory=list)  # of each push
    trainer_wait_s: float = 0.0
    server_wait_s: float = 0.0


class Server:
    """Gradients from the trainers; see ``GradientSource``.

    Args:
        duties: what the loop needs.
        group: all ranks.
        waits_for_all: a step waits for all trainers; else for any of them.
    """

    def __init__(self, duties: Duties, group: dist.ProcessGroup, *, waits_for_all: bool) -> None:
        self._duties, self._module, self._group = duties, duties.module, group
        self._waits_for_all = waits_for_all
        self._idle = list(range(1, dist.get_world_size(group)))
        self._version, self._versions = 0, dict[int, int]()  # updates taken; those a trainer has
        self._next, self._is_stopping = 0, False  # the next batch to hand out
        # A push's length and dtype, without its memory.
        self._num_numbers = 3 + len(duties.scalars)
        numbers = torch.zeros(self._num_numbers)
        self._push = flatten_gradients(self._module, numbers).to("meta")
        self._interval = _Interval()

    def compute(self, state: Any, batch: Any) -> Tensor:
        """Leave a step's gradients in the module; return its mean loss, a scalar.

        In sync the trainers compute the loop's batch; in async they have batches already.
        """
        if not self._interval.steps:
            self._interval.started = time.perf_counter()
        pushes = self._collect(batch.number)
        parameters = list(self._module.parameters())
        total = sum(pushes[1:], start=pushes[0])
        sizes = [parameter.numel() for parameter in parameters]
        waited_s, loss, num_tokens, *scalars = total[-self._num_numbers :]
        divisor = float(num_tokens) or 1.0  # tokens of a mean sample; 0 if samples are counted
        gradients = total[: sum(sizes)] / len(pushes) / divisor
        counts = total[sum(sizes) :]
        for parameter, gradient, count in zip(
            parameters, gradients.split(sizes), counts[: len(sizes)].tolist(), strict=True
        ):
            # None, not zero: with a zero gradient the optimizer would decay a frozen parameter.
            parameter.grad = gradient.view(parameter.shape).to(parameter) if count else None
        rest = pushes[0][sum(sizes) + len(sizes) :]
        buffers = rest[: -self._num_numbers]
        copy_parts(buffers, list(self._module.buffers()))  # the lowest rank's, as under DDP
        self._version += 1
        self._interval.steps += 1
        self._interval.trainer_wait_s += float(waited_s)
        named = zip(self._duties.scalars, scalars, strict=True)
        state.scalars = {name: value / divisor for name, value in named}
        self._duties.mark(StepPart.COLLECT)
        mean_loss: Tensor = loss / divisor
        return mean_loss

    def may_stop(self, is_asked: bool) -> bool:
        """Return whether to stop now: if asked, and once no batch is under way."""
        self._is_stopping = is_asked
        return is_asked and not self._versions

    def metrics(self) -> dict[str, float]:
        """Return staleness (in updates), waiting times and pushes since the last call."""
        interval, self._interval = self._interval, _Interval()
        pushes = len(interval.staleness)
        return {
            "ps/staleness_mean": sum(interval.staleness) / pushes,
            "ps/staleness_max": max(interval.staleness),
            "ps/trainer_wait_ms": 1000 * interval.trainer_wait_s / pushes,
            "ps/server_wait_ms": 1000 * interval.server_wait_s / interval.steps,
            "ps/pushes_per_s": pushes / (time.perf_counter() - interval.started),
            "ps/num_trainers": len(self._idle) + len(self._versions),
        }

    def close(self, status: Status) -> None:
        """Send the trainers the run's status."""
        (code,) = (code for code, name in STATUS_OF.items() if name == status)
        for rank in self._idle:
            dist.send(torch.tensor([code]), rank, self._group)

    def _collect(self, number: int) -> list[Tensor]:
        """Hand out batches to idle trainers; return a step's pushes, in sync by rank."""
        if self._waits_for_all:
            numbers = [number] * len(self._idle)
        else:
            self._next = max(self._next, number)
            ahead = 0 if self._is_stopping else self._duties.steps_ahead(number)
            numbers = list(range(self._next, number + ahead))[: len(self._idle)]
            self._next += len(numbers)
        trainers, self._idle = self._idle[: len(numbers)], self._idle[len(numbers) :]
        self._versions |= dict.fromkeys(trainers, self._version)
        values = flatten_state(self._module)
        started = time.perf_counter()
        for rank, one in zip(trainers, numbers, strict=True):
            dist.send(torch.tensor([one]), rank, self._group)
            dist.send(values, rank, self._group)
        sources = trainers if self._waits_for_all else [None]
        pushes = [torch.empty_like(self._push, device="cpu") for _ in sources]
        trainers = [
            dist.recv(push, src=source, group=self._group)
            for push, source in zip(pushes, sources, strict=True)
        ]
        self._interval.server_wait_s += time.perf_counter() - started
        self._interval.staleness += [self._version - self._versions.pop(one) for one in trainers]
        self._idle += trainers
        return pushes


def _connect(duties: Duties) -> dist.ProcessGroup:
    """Return a group of all ranks for messages on the CPU. Collective: every rank must call."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=duties.timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def flatten_state(module: nn.Module) -> Tensor:
    """Return the parameters and the buffers as one vector on the CPU."""
    return _flatten([*module.parameters(), *module.buffers()], module)


def flatten_gradients(module: nn.Module, numbers: Tensor) -> Tensor:
    """Return what a trainer pushes, as one vector on the CPU.

    Args:
        module: with the gradients of a batch.
        numbers: a vector to append.

    Returns:
        The gradients; for each parameter 1 if it has a gradient, else 0; the buffers; the numbers.
    """
    parameters = list(module.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters])
    return _flatten([*gradients, has_gradient, *module.buffers(), numbers], module)


@torch.no_grad()
def copy_parts(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy the parts of a vector into tensors, which keep their memory format."""
    parts = values.split([tensor.numel() for tensor in tensors]) if tensors else ()
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def _flatten(tensors: list[Tensor], module: nn.Module) -> Tensor:
    """Return a vector of float32, or of float64 if float32 would round a value of the model."""
    sent = (*module.named_parameters(), *module.named_buffers())
    is_wide = any(
        tensor.dtype not in EXACT_IN_FLOAT32
        # BatchNorm's count of batches is exact up to 2**24.
        and not name.endswith("num_batches_tracked")
        for name, tensor in sent
    )
    dtype = torch.float64 if is_wide else torch.float32
    return torch.cat([tensor.detach().to("cpu", dtype).reshape(-1) for tensor in tensors])
