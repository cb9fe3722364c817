"""The server of ``ps``: assigns batches to trainers and collects their gradients."""

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
    flatten_gradients,
    flatten_state,
)

POLL_S = 0.2  # between two checks of which trainers have ended
SHUTDOWN_GRACE_S = 5.0  # for sending the trainers the run's status


@dataclass
class _Interval:
    """Measurements since the last line of metrics."""

    started: float = field(default_factory=time.perf_counter)
    pushes: int = 0
    staleness: list[int] = field(default_factory=list)
    trainer_wait_s: float = 0.0
    server_wait_s: float = 0.0


@dataclass(frozen=True)
class _Task:
    """A batch that was assigned to a trainer."""

    step: int
    version: int  # updates that its parameters contain
    values: Tensor  # the flattened parameters
    push: Future[Tensor] = field(default_factory=Future)


class Server:
    """Gradients from the trainers; see ``GradientSource``."""

    def __init__(
        self, duties: Duties, *, groups: Sequence[dist.ProcessGroup], waits_for_all: bool
    ) -> None:
        """Start a thread per trainer.

        Args:
            duties: what the loop needs.
            groups: a process group with each trainer, in the order of their ranks.
            waits_for_all: a step waits for all trainers; else for any of them.
        """
        self._duties, self._module = duties, duties.module
        self._waits_for_all = waits_for_all
        self._groups = dict(enumerate(groups, start=1))  # by trainer
        self._idle, self._tasks = list(self._groups), dict[int, _Task]()
        self._version = 0  # updates taken
        self._todo = deque(duties.outstanding)  # batches to assign before any new one
        first, last = duties.first_step + len(self._todo), duties.first_step + duties.num_steps
        self._new = deque(range(first, last))  # batches that no trainer has had yet
        # A push's length and dtype, without its memory.
        self._num_numbers = 3 + len(duties.scalars)
        numbers = torch.zeros(self._num_numbers)
        self._push = flatten_gradients(self._module, numbers).to("meta")
        self._interval, self.lost = _Interval(), list[int]()
        self._alive_s = duties.timeout_s / ALIVE_PER_TIMEOUT
        # A thread per trainer, so that no trainer waits for another one's messages. It sends
        # ALIVE while the main thread evaluates or saves for long.
        self._inboxes = {rank: queue.SimpleQueue[_Task | int | None]() for rank in self._groups}
        self._threads = {
            rank: threading.Thread(target=self._run_thread, args=(rank,), daemon=True)
            for rank in self._groups
        }
        for thread in self._threads.values():
            thread.start()

    def compute(self, state: Any, batch: Any) -> Tensor:
        """Leave a step's gradients in the module; return its mean loss, a scalar.

        In sync the trainers compute the loop's batch; in async they have batches already.

        Raises:
            RuntimeError: a trainer is lost in sync, or all trainers are lost in async.
        """
        if not self._interval.pushes:
            self._interval.started = time.perf_counter()
        pushes = self._from_all(batch.number) if self._waits_for_all else [self._from_any()]
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
        self._interval.pushes += len(pushes)
        self._interval.trainer_wait_s += float(waited_s)
        named = zip(self._duties.scalars, scalars, strict=True)
        state.scalars = {name: value / divisor for name, value in named}
        self._duties.mark(StepPart.COLLECT)
        mean_loss: Tensor = loss / divisor
        return mean_loss

    def outstanding(self, state: Any) -> tuple[int, ...]:
        """Return the assigned batches whose gradients were not applied yet."""
        return tuple(sorted([*self._todo, *(task.step for task in self._tasks.values())]))

    def metrics(self) -> dict[str, float]:
        """Return staleness (in updates), waiting times and pushes since the last call."""
        interval, self._interval = self._interval, _Interval()
        steps = len(interval.staleness)
        return {
            "ps/staleness_mean": sum(interval.staleness) / steps,
            "ps/staleness_max": max(interval.staleness),
            "ps/trainer_wait_ms": 1000 * interval.trainer_wait_s / interval.pushes,
            "ps/server_wait_ms": 1000 * interval.server_wait_s / steps,
            "ps/pushes_per_s": interval.pushes / (time.perf_counter() - interval.started),
            "ps/num_trainers": len(self._idle) + len(self._tasks),
        }

    def close(self, status: Status) -> None:
        """Send the trainers the run's status, and drop what they still compute."""
        while self._tasks:
            self._wait_for_any()
        (code,) = (code for code, name in STATUS_OF.items() if name == status)
        for rank in self._idle:
            self._inboxes[rank].put(code)
        deadline = time.monotonic() + SHUTDOWN_GRACE_S
        for rank in self._idle:  # the thread of a lost trainer may wait for long
            self._threads[rank].join(max(0.0, deadline - time.monotonic()))

    def _from_all(self, step: int) -> list[Tensor]:
        values = flatten_state(self._module)
        trainers, self._idle = self._idle, []
        for rank in trainers:
            self._assign(rank, step, values)
        started = time.perf_counter()
        pushes = [self._tasks[rank].push.result() for rank in trainers]
        self._interval.server_wait_s += time.perf_counter() - started
        self._interval.staleness.append(0)
        self._idle, self._tasks = trainers, {}
        return pushes

    def _from_any(self) -> Tensor:
        while True:
            values = flatten_state(self._module)
            while self._idle and (batches := self._todo or self._new):
                self._assign(self._idle.pop(0), batches.popleft(), values)
            if not self._tasks:
                raise RuntimeError(
                    f"all trainers are lost (ranks {', '.join(map(str, self.lost))}); see their "
                    "logs in the run folder, then resume it"
                )
            started = time.perf_counter()
            push = self._wait_for_any()
            self._interval.server_wait_s += time.perf_counter() - started
            if push is not None:
                return push

    def _wait_for_any(self) -> Tensor | None:
        """Wait for any trainer; return its push, or None if it is lost."""
        while not (answered := [rank for rank, task in self._tasks.items() if task.push.done()]):
            # Gloo does not always notice that the other process has ended.
            if answered := [rank for rank in self._tasks if rank in self._duties.ended()]:
                break
            pushes = [task.push for task in self._tasks.values()]
            wait(pushes, timeout=POLL_S, return_when=FIRST_COMPLETED)
        rank = answered[0]
        task = self._tasks.pop(rank)
        error = task.push.exception() if task.push.done() else None
        if task.push.done() and not error:
            self._interval.staleness.append(self._version - task.version)
            self._idle.append(rank)
            return task.push.result()
        self._todo.append(task.step)
        self.lost.append(rank)
        self._inboxes[rank].put(None)
        was_silent = "imed out" in str(error) and rank not in self._duties.ended()
        reason = "no answer within backend.timeout_s" if was_silent else "its process ended"
        left = len(self._idle) + len(self._tasks)
        self._duties.log(
            f"rank {rank} is lost ({reason}); the run continues with {left} trainer(s)"
        )
        return None

    def _assign(self, rank: int, step: int, values: Tensor) -> None:
        self._tasks[rank] = _Task(step, self._version, values)
        self._inboxes[rank].put(self._tasks[rank])

    def _run_thread(self, rank: int) -> None:
        """Exchange messages with a trainer until it gets the run's status, or is lost."""
        while (item := self._next_item(rank)) is not None:
            if isinstance(item, int):
                with suppress(RuntimeError):  # the trainer has ended already
                    self._send_number(rank, item)
                return
            try:
                self._send_number(rank, item.step)
                dist.send(item.values, dst=rank, group=self._groups[rank])
                push = torch.empty_like(self._push, device="cpu")
                dist.recv(push, src=rank, group=self._groups[rank])
                item.push.set_result(push)
            except Exception as error:  # any: the main thread waits for the push
                item.push.set_exception(error)

    def _next_item(self, rank: int) -> _Task | int | None:
        while True:
            try:
                return self._inboxes[rank].get(timeout=self._alive_s)
            except queue.Empty:
                with suppress(RuntimeError):  # the trainer has ended; its next task fails
                    self._send_number(rank, ALIVE)

    def _send_number(self, rank: int, number: int) -> None:
        dist.send(torch.tensor([number]), dst=rank, group=self._groups[rank])
