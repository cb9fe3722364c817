"""Processes that load batches for a rank, some batches ahead.

torch's DataLoader maps new shared memory for each tensor of a batch, and sends it through queues
that have threads of their own: 0.5 to 2 ms a batch, a third of it in the rank. A pipe to each
worker and memory that is used again take a tenth of that; see ``shared_blocks``.
"""

import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from ddp_runner.data.shared_blocks import HAS_BLOCKS, BlockReceiver, BlockSender
from ddp_runner.host.processes import die_with_parent, ignore_stop_signals


class WorkerEndedError(Exception):
    """A worker has ended while it was needed; the text says how."""


@dataclass(frozen=True)
class Unsendable:
    """What comes instead of a result that cannot be pickled."""

    reason: str
    trace: str


class Workers:
    """Processes that compute a function of many arguments, some of them ahead of time.

    They end with this object or with this process, however it ends. The stop signals, which may
    reach every process at once, do not end them.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        number: int,
        ahead: int,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """Start the processes.

        Args:
            function: what they compute. On Linux they are forked, so it need not be pickled.
            number: of processes.
            ahead: arguments that each of them has at a time.
            finish: what a thread of this process makes of each result, also ahead of time.
        """
        is_forked = sys.platform == "linux"
        context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
        self._tickets, self._limit = count(), number * ahead
        self._wanted, self._results = set[int](), dict[int, Any]()
        self._finish, self._workers = finish, list[_Worker]()
        self._thread = ThreadPoolExecutor(1) if finish is not None else None
        for _ in range(number):
            own, other = context.Pipe()
            inherited = [one.pipe for one in self._workers] if is_forked else []
            process = context.Process(target=_work, args=(other, function, inherited), daemon=True)
            process.start()
            other.close()  # so that the pipe ends with the worker
            self._workers.append(_Worker(process, own, BlockReceiver(own)))
        # At exit it comes before multiprocessing waits for the end of its children.
        self.close = Finalize(self, _end, args=(list(self._workers),), exitpriority=0)

    def map(self, arguments: Iterable[Any]) -> Iterator[Any]:
        """Yield the function of each argument, in order. It may be left before its end.

        Raises:
            WorkerEndedError: a worker has ended.
        """
        arguments, waiting = iter(arguments), deque[tuple[int, Future[Any] | None]]()
        thread = self._thread

        def send() -> None:
            for argument in islice(arguments, self._limit - len(waiting)):
                ticket = self._send(argument)
                waiting.append((ticket, thread.submit(self._result, ticket) if thread else None))

        try:
            send()
            while waiting:
                ticket, future = waiting[0]
                result = future.result() if future else self._result(ticket)
                waiting.popleft()
                send()  # before the caller computes, so that every worker has enough to do
                yield result
        finally:
            for ticket, _ in waiting:
                self._wanted.discard(ticket)
                self._results.pop(ticket, None)

    def _send(self, argument: Any) -> int:
        ticket = next(self._tickets)
        worker = self._workers[ticket % len(self._workers)]
        self._wanted.add(ticket)
        with _watched(worker):
            worker.pipe.send((ticket, argument, worker.receiver.take_dropped()))
        return ticket

    def _result(self, ticket: int) -> Any:
        """Return a result, or None if nobody wants it any more."""
        worker = self._workers[ticket % len(self._workers)]
        while ticket in self._wanted and ticket not in self._results:
            with _watched(worker):
                received, result = worker.receiver.receive()
            if received in self._wanted:
                self._results[received] = result
        self._wanted.discard(ticket)
        result = self._results.pop(ticket, None)
        return result if self._finish is None else self._finish(result)


@dataclass(frozen=True)
class _Worker:
    """A worker, as the process that it loads for sees it."""

    process: BaseProcess
    pipe: Connection
    receiver: BlockReceiver


@contextmanager
def _watched(worker: _Worker) -> Iterator[None]:
    """Raise WorkerEndedError if the worker ends in the block."""
    try:
        yield
    except (EOFError, OSError) as error:
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise WorkerEndedError(f"ended {how}") from error


def _end(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.pipe.close()


def _work(
    pipe: Connection, function: Callable[[Any], Any], inherited: Iterable[Connection]
) -> None:
    """Compute what the pipe asks for, until it ends."""
    ignore_stop_signals()
    die_with_parent()
    for other in inherited:  # else the other workers' pipes would not end with the rank
        other.close()
    torch.set_num_threads(1)
    sender, receive = BlockSender(pipe), pipe.recv
    if not HAS_BLOCKS:
        # Large results wait in the pipe until the rank reads. If it waited for this process to
        # read at the same time, both would wait for ever.
        arguments = SimpleQueue[Any]()
        Thread(target=_receive, args=(pipe, arguments), daemon=True).start()
        receive = arguments.get
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the rank wants no more
        while (message := receive()) is not None:
            ticket, argument, dropped = message
            sender.release(dropped)
            result = function(argument)
            try:
                sender.send(ticket, result)
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:  # pickling calls the user's code
                reason = f"{type(error).__name__}: {error}"
                sender.send(ticket, Unsendable(reason, traceback.format_exc()))


def _receive(pipe: Connection, arguments: "SimpleQueue[Any]") -> None:
    with suppress(EOFError, OSError):
        while True:
            arguments.put(pipe.recv())
    arguments.put(None)
