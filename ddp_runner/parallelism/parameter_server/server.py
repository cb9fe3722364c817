"""The server's side of ``ps``: hands out batches with the parameters, and collects gradients."""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.job import Status
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Duties
from ddp_runner.parallelism.parameter_server.messages import (
    ALIVE,
    ALIVE_PER_TIMEOUT,
    STATUS_OF,
    copy_parts,
    message_dtype,
    packed,
)

POLL_S = 0.2  # between two looks at which trainers have ended
LAST_WORDS_S = 5.0  # for the trainers to be told of the end


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
    values: Tensor  # the packed parameters
    push: Future[Tensor] = field(default_factory=Future)


class Server:
    """Hands out batches with the parameters and collects gradients: see ``GradientSource``."""

    def __init__(self, duties: Duties, *, links: Sequence[dist.ProcessGroup], waits: bool) -> None:
        """Begin to serve.

        Args:
            duties: what the loop needs.
            links: a group with each trainer, by rank.
            waits: each step waits for all trainers; else for any one.
        """
        self._duties, self._module, self._waits = duties, duties.module, waits
        self._links = dict(enumerate(links, start=1))  # by trainer
        self._idle, self._tasks = list(self._links), dict[int, _Task]()
        self._version = 0  # updates taken
        self._todo = deque(duties.outstanding)  # batches to hand out before any new one
        self._next = duties.first_step + len(self._todo)
        self._left = max(0, duties.num_steps - len(self._todo))  # new batches not handed out yet
        self._size = packed(self._module, gradients=True, facts=torch.zeros(2)).numel()
        self._dtype = message_dtype(self._module)
        self._lap, self.lost = _Lap(), list[int]()
        self._alive_s = duties.timeout_s / ALIVE_PER_TIMEOUT
        # A thread for each trainer, so that none waits for the messages of another. It tells its
        # trainer that the server lives while the main thread evaluates or saves for long.
        self._inboxes = {rank: queue.SimpleQueue[_Task | int | None]() for rank in self._links}
        self._threads = {
            rank: threading.Thread(target=self._talk, args=(rank,), daemon=True)
            for rank in self._links
        }
        for thread in self._threads.values():
            thread.start()

    def compute(self, state: Any, batch: Any) -> Tensor:
        """Leave a step's gradients in the module; return the mean loss over its samples.

        Args:
            state: of the loop; not needed.
            batch: of the loop; a step that waits for all trainers takes its number.

        Raises:
            RuntimeError: one trainer is lost, or all of an asynchronous run.
        """
        if not self._lap.pushes:
            self._lap.started = time.perf_counter()
        pushes = self._from_all(batch.number) if self._waits else [self._from_any()]
        parameters = list(self._module.parameters())
        total = sum(pushes[1:], start=pushes[0])
        sizes = [one.numel() for one in parameters]
        gradients, counts = total[: sum(sizes)] / len(pushes), total[sum(sizes) :]
        for parameter, gradient, count in zip(
            parameters, gradients.split(sizes), counts[: len(sizes)].tolist(), strict=True
        ):
            # A zero gradient is not none: the optimizer would decay a frozen parameter.
            parameter.grad = gradient.view(parameter.shape).to(parameter) if count else None
        rest = pushes[0][sum(sizes) + len(sizes) :]
        copy_parts(rest[:-2], list(self._module.buffers()))  # of the lowest rank, as under DDP
        self._version += 1
        self._lap.pushes += len(pushes)
        self._lap.trainer_wait_s += sum(float(push[-1]) for push in pushes)
        self._duties.mark(StepPart.COLLECT)
        return sum((push[-2] for push in pushes), start=torch.zeros(()))

    def outstanding(self, state: Any) -> tuple[int, ...]:
        """Return the batches that were handed out and whose gradients have not been taken."""
        return tuple(sorted([*self._todo, *(task.step for task in self._tasks.values())]))

    def metrics(self) -> dict[str, float]:
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

    def close(self, status: Status) -> None:
        """Tell the trainers how the run ended; what they still compute is dropped."""
        while self._tasks:
            rank, push = self._first_answer()
            if push is not None:
                self._idle.append(rank)
        (code,) = (code for code, name in STATUS_OF.items() if name == status)
        for rank in self._idle:
            self._inboxes[rank].put(code)
        deadline = time.monotonic() + LAST_WORDS_S
        for rank in self._idle:  # a lost one's thread may wait for its last message for long
            self._threads[rank].join(max(0.0, deadline - time.monotonic()))

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

    def _from_any(self) -> Tensor:
        while True:
            self._give_all_idle()
            if not self._tasks:
                raise RuntimeError(
                    f"all trainers are lost (ranks {', '.join(map(str, self.lost))}); see their "
                    "logs in the run folder, then resume it"
                )
            started = time.perf_counter()
            rank, push = self._first_answer()
            self._lap.server_wait_s += time.perf_counter() - started
            if push is not None:
                self._idle.append(rank)
                return push

    def _first_answer(self) -> tuple[int, Tensor | None]:
        """Wait for any trainer; return its rank and push, None if it is lost."""
        while not (answered := [rank for rank, task in self._tasks.items() if task.push.done()]):
            # A message to a process that has just ended may never fail: gloo does not always see.
            if answered := [rank for rank in self._tasks if rank in self._duties.ended()]:
                break
            pushes = [task.push for task in self._tasks.values()]
            wait(pushes, timeout=POLL_S, return_when=FIRST_COMPLETED)
        rank = answered[0]
        task = self._tasks.pop(rank)
        if not task.push.done() or task.push.exception():
            self._todo.append(task.step)
            reason = str(task.push.exception()) if task.push.done() else ""
            self._lose(rank, was_silent="imed out" in reason and rank not in self._duties.ended())
            return rank, None
        self._lap.staleness.append(self._version - task.version)
        return rank, task.push.result()

    def _give_all_idle(self) -> None:
        values = packed(self._module)
        while self._idle and (self._todo or self._left):
            rank = self._idle.pop(0)
            if self._todo:
                step = self._todo.popleft()
            else:
                step, self._next, self._left = self._next, self._next + 1, self._left - 1
            self._give(rank, step, values)

    def _give(self, rank: int, step: int, values: Tensor) -> None:
        self._tasks[rank] = _Task(step, self._version, values)
        self._inboxes[rank].put(self._tasks[rank])

    def _talk(self, rank: int) -> None:
        """Exchange messages with a trainer until its last one; None ends without a message."""
        while (item := self._next_item(rank)) is not None:
            if isinstance(item, int):
                with suppress(RuntimeError):  # it is gone, and needs no telling
                    self._tell(rank, item)
                return
            try:
                item.push.set_result(self._exchange(rank, item))
            except Exception as error:  # of any kind: the main thread waits for an answer
                item.push.set_exception(error)

    def _next_item(self, rank: int) -> _Task | int | None:
        while True:
            try:
                return self._inboxes[rank].get(timeout=self._alive_s)
            except queue.Empty:
                with suppress(RuntimeError):  # it is gone: its next task says so
                    self._tell(rank, ALIVE)

    def _exchange(self, rank: int, task: _Task) -> Tensor:
        self._tell(rank, task.step)
        dist.send(task.values, dst=rank, group=self._links[rank])
        push = torch.empty(self._size, dtype=self._dtype)
        dist.recv(push, src=rank, group=self._links[rank])
        return push

    def _tell(self, rank: int, number: int) -> None:
        dist.send(torch.tensor([number]), dst=rank, group=self._links[rank])

    def _lose(self, rank: int, *, was_silent: bool) -> None:
        self.lost.append(rank)
        self._inboxes[rank].put(None)
        left = len(self._idle) + len(self._tasks)
        reason = "no answer within backend.timeout_s" if was_silent else "its process ended"
        self._duties.log(f"rank {rank} is lost ({reason}); the run goes on with {left} trainer(s)")
