"""The server's side of ``ps``: hands out batches with the parameters, and collects gradients."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

STATUS_OF = {-1: "completed", -2: "preempted"}  # what a trainer is sent in place of a batch


@dataclass
class _Lap:
    """What happened since the last line of metrics."""

    started: float = field(default_factory=time.perf_counter)
    pushes: int = 0
    staleness: list[int] = field(default_factory=list)
    trainer_wait_s: float = 0.0
    server_wait_s: float = 0.0


@dataclass(frozen=True)
class _Task:
    """A batch that a trainer has been given."""

    step: int
    version: int  # updates that its parameters have seen
    push: Future[Tensor]


class Server:
    """Hands out batches with the parameters, and collects gradients; the loop's `Gradients`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        links: Sequence[dist.ProcessGroup],
        waits: bool,
        num_steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._module, self._waits, self._say = module, waits, say
        self._links = dict(enumerate(links, start=1))  # by trainer
        self._idle, self._tasks = list(self._links), dict[int, _Task]()
        self._version, self._left = 0, num_steps  # updates taken; batches not handed out yet
        self._todo = deque[int]()  # batches of trainers that were lost
        self._next: int | None = None
        self._size = packed(module, gradients=True, facts=torch.zeros(2)).numel()
        self._dtype = _dtype(module)
        # A thread for each trainer: its push is received while others still compute.
        self._pool = ThreadPoolExecutor(max_workers=len(links))
        self._lap, self.lost = _Lap(), list[int]()

    def collect(self, *, step: int) -> Tensor:
        """Leave the gradients of a step in the module; return the mean loss over its samples.

        Raises:
            RuntimeError: one trainer is lost, or all of an asynchronous run.
        """
        if not self._lap.pushes:
            self._lap.started = time.perf_counter()
        pushes = self._from_all(step) if self._waits else [self._from_any(step)]
        total = sum(pushes[1:], start=pushes[0])
        sizes = [one.numel() for one in self._module.parameters()]
        gradients, rest = total[: sum(sizes)], pushes[0][sum(sizes) :]
        for parameter, gradient in zip(
            self._module.parameters(), (gradients / len(pushes)).split(sizes), strict=True
        ):
            parameter.grad = gradient.view(parameter.shape).to(parameter)
        copy_parts(rest[:-2], list(self._module.buffers()))  # of the lowest rank, as under DDP
        self._version += 1
        self._lap.pushes += len(pushes)
        self._lap.trainer_wait_s += sum(float(push[-1]) for push in pushes)
        return sum((push[-2] for push in pushes), start=torch.zeros(()))

    def figures(self) -> dict[str, float]:
        """Return staleness (updates), waiting times and pushes since the last call."""
        lap, self._lap = self._lap, _Lap()
        steps = len(lap.staleness)
        return {
            "ps/staleness_mean": sum(lap.staleness) / steps,
            "ps/staleness_max": max(lap.staleness),
            "ps/trainer_wait_ms": 1000 * lap.trainer_wait_s / lap.pushes,
            "ps/server_wait_ms": 1000 * lap.server_wait_s / steps,
            "ps/pushes_per_s": lap.pushes / (time.perf_counter() - lap.started),
            "ps/num_trainers": len(self._idle) + len(self._tasks),
        }

    def close(self, status: str) -> None:
        """Tell the trainers how the run ended; what they still compute is dropped."""
        wait([task.push for task in self._tasks.values()])
        (code,) = (code for code, name in STATUS_OF.items() if name == status)
        for rank in [*self._idle, *self._tasks]:
            try:
                dist.send(torch.tensor([code]), dst=rank, group=self._links[rank])
            except RuntimeError as error:
                self._lose(rank, error)
        self._pool.shutdown()

    def _from_all(self, step: int) -> list[Tensor]:
        values = packed(self._module)
        trainers, self._idle = self._idle, []
        for rank in trainers:
            self._give(rank, step, values)
        started = time.perf_counter()
        pushes = [self._tasks[rank].push.result() for rank in trainers]
        self._lap.server_wait_s += time.perf_counter() - started
        self._lap.staleness.append(0)
        self._idle, self._tasks = trainers, {}
        return pushes

    def _from_any(self, step: int) -> Tensor:
        if self._next is None:
            self._next = step
        while True:
            self._give_all_idle()
            if not self._tasks:
                raise RuntimeError(
                    f"all trainers are lost (ranks {', '.join(map(str, self.lost))}); see their "
                    "logs in the run folder, then resume it"
                )
            started = time.perf_counter()
            wait([task.push for task in self._tasks.values()], return_when=FIRST_COMPLETED)
            self._lap.server_wait_s += time.perf_counter() - started
            rank = next(rank for rank, task in self._tasks.items() if task.push.done())
            task = self._tasks.pop(rank)
            if error := task.push.exception():
                self._todo.append(task.step)
                self._lose(rank, error)
                continue
            self._lap.staleness.append(self._version - task.version)
            self._idle.append(rank)
            return task.push.result()

    def _give_all_idle(self) -> None:
        values = packed(self._module)
        while self._idle and (self._todo or self._left):
            rank = self._idle.pop(0)
            if self._todo:
                step = self._todo.popleft()
            else:
                assert self._next is not None
                step, self._next, self._left = self._next, self._next + 1, self._left - 1
            try:
                self._give(rank, step, values)
            except RuntimeError as error:
                self._todo.append(step)
                self._lose(rank, error)

    def _give(self, rank: int, step: int, values: Tensor) -> None:
        link = self._links[rank]
        dist.send(torch.tensor([step]), dst=rank, group=link)
        dist.send(values, dst=rank, group=link)
        push = torch.empty(self._size, dtype=self._dtype)

        def received() -> Tensor:
            dist.recv(push, src=rank, group=link)
            return push

        self._tasks[rank] = _Task(step, self._version, self._pool.submit(received))

    def _lose(self, rank: int, error: BaseException) -> None:
        self.lost.append(rank)
        left = len(self._idle) + len(self._tasks)
        was_silent = "imed out" in str(error)
        reason = "no answer within backend.timeout_s" if was_silent else "its process ended"
        self._say(f"rank {rank} is lost ({reason}); the run goes on with {left} trainer(s)")


def _dtype(module: nn.Module) -> torch.dtype:
    """Return the type of a message: float64 where a parameter has it, else float32."""
    wide = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    return torch.float64 if wide else torch.float32


@torch.no_grad()
def packed(module: nn.Module, *, gradients: bool = False, facts: Tensor | None = None) -> Tensor:
    """Return the parameters as one vector on the CPU; or gradients, buffers and facts."""
    tensors: list[Tensor] = list(module.parameters())
    if gradients:
        tensors = [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]
        tensors += module.buffers()
    if facts is not None:
        tensors.append(facts)
    dtype = _dtype(module)
    return torch.cat([one.detach().to("cpu", dtype).reshape(-1) for one in tensors])


@torch.no_grad()
def copy_parts(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy a vector's parts into tensors, which keep their memory format."""
    parts = values.split([one.numel() for one in tensors]) if tensors else ()
    for one, part in zip(tensors, parts, strict=True):
        one.copy_(part.view(one.shape))
