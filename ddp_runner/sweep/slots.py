"""Parallel jobs of a sweep: each slot is a process on its own cores and GPUs.

A slot is a launcher with its own fork server. It shares the sweep with the other slots through the
ledger, as any two launchers do. Its parent sends it the batches and the request to stop, and it
ends with its parent.

Through its pipe a slot sends the number of each job before it starts, and waits for an answer; at
the end of a batch it sends None.
"""

import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import Empty, SimpleQueue
from typing import TextIO

from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware, core_shares, gpu_shares
from ddp_runner.host.processes import (
    die_with_launcher,
    ignore_stop_signals,
    start_fork_server,
    stop_signals_held,
)
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import EXIT_FAILED, EXIT_USER_ERROR, STOP, Job, Outcome, Slot, Status
from ddp_runner.launch.launcher import launch, print_error
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.sweep.jobs import Batch, recorded, run_jobs

SHUTDOWN_GRACE_S = 10.0  # from the end of the work to that of a slot, or of its output
CHUNK_BYTES = 2**16
POLL_S = 0.05  # between two checks for a request to stop


class Slots:
    """The slots of a sweep, from their start to ``close``."""

    def __init__(self, num_slots: int, hardware: Hardware) -> None:
        self._temp = temp_folder()
        self._printing = threading.Lock()
        self._current: dict[int, int] = {}  # the number of the job that each slot runs
        # A slot's pipe, and whether the slot has finished the batch; else it has ended.
        self._finished: SimpleQueue[tuple[Connection, bool]] = SimpleQueue()
        cores = core_shares(num_slots, num_cores=hardware.num_cores)
        gpus = gpu_shares(num_slots, num_gpus=hardware.num_gpus)
        self._slots = dict(
            self._start(Slot(number + 1, cores[number], gpus[number], self._temp))
            for number in range(num_slots)
        )

    def run(self, batch: Batch) -> list[Outcome]:
        """Run a batch to its end; return how each job ended, last a signal that stopped it."""
        folders = {job.number: job.run_dir for job in batch.jobs.values() if job.run_dir}
        stop = StopRequests(
            running=lambda: [folders[one] for one in folders.keys() & self._current.values()]
        )
        stop.may_save = True
        with stop.handled():
            for pipe in self._slots:
                with suppress(OSError):  # the slot has ended, which is in the queue
                    pipe.send(batch)
            working = set(self._slots)
            while working:
                if stop.is_asked:
                    (self._temp / STOP).touch()
                    stop.say(is_training=bool(self._current))
                try:
                    pipe, is_done = self._finished.get(timeout=POLL_S)
                except Empty:
                    continue
                working.discard(pipe)  # a slot may end after it has finished
                if not is_done:
                    process = self._slots.pop(pipe)
                    process.join()
                    if stop.is_asked:
                        continue
                    print_error(
                        f"a slot of the sweep ended with exit code {process.exitcode}; the other "
                        "slots take its jobs; if any are left, give the same command again"
                    )
        entries = batch.ledger.read()
        found = [recorded(entries[job_id], job) for job_id, job in batch.jobs.items()]
        outcomes = [outcome for outcome in found if outcome is not None]
        if stop.received is not None:
            outcomes.append(Outcome(Status.PREEMPTED, 128 + stop.received))
        elif len(outcomes) < len(found) and not batch.has_failed():
            # All slots have ended early; each has printed why.
            outcomes.append(Outcome(Status.FAILED, EXIT_FAILED))
        return outcomes

    def close(self) -> None:
        """End all slots."""
        for pipe, process in self._slots.items():
            with suppress(OSError):
                pipe.send(None)
            process.join(SHUTDOWN_GRACE_S)
            process.kill()

    def _start(self, slot: Slot) -> tuple[Connection, SpawnProcess]:
        pipe, child_end = multiprocessing.Pipe()
        (out, child_out), (err, child_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        with stop_signals_held():
            process = SpawnProcess(target=run_slot, args=(slot, child_end, child_out, child_err))
            process.start()
        for end in (child_end, child_out, child_err):
            end.close()
        outputs = [Output(out, sys.stdout), Output(err, sys.stderr)]
        threading.Thread(target=self._follow, args=(slot, pipe, outputs), daemon=True).start()
        return pipe, process

    def _follow(self, slot: Slot, pipe: Connection, outputs: list["Output"]) -> None:
        """Show what a slot prints, each line with the number of its job, until the slot ends."""
        label = f"slot {slot.number}"
        for event in events(pipe, outputs):
            match event:
                case (text, stream):
                    with self._printing:
                        print(f"[{label}] {text}", file=stream, flush=True)
                case int(number):
                    label, self._current[slot.number] = str(number), number
                    with suppress(OSError):  # the slot has ended meanwhile
                        pipe.send(None)
                case None:
                    self._finished.put((pipe, True))
        self._finished.put((pipe, False))


class Output:
    """A stream of a slot that its parent reads from a pipe and shows elsewhere."""

    def __init__(self, source: Connection, target: TextIO) -> None:
        self.source, self._target, self.is_open = source, target, True
        self._rest = b""  # the beginning of a line
        os.set_blocking(source.fileno(), False)

    def lines(self, *, all_of_it: bool) -> Iterator[tuple[str, TextIO]]:
        """Yield the lines that have come, and the target of each.

        Args:
            all_of_it: read until the pipe is empty, and yield the beginning of the last line, too.
        """
        data = self._rest
        with suppress(BlockingIOError):  # the pipe is empty
            while chunk := os.read(self.source.fileno(), CHUNK_BYTES):
                data += chunk
                if not all_of_it:
                    break
            else:
                self.is_open = False
        lines = re.split(rb"[\r\n]", data)
        self._rest = b"" if all_of_it or not self.is_open else lines.pop()
        texts = (line.decode(errors="replace").rstrip() for line in lines)
        yield from ((text, self._target) for text in texts if text)


def events(pipe: Connection, outputs: list[Output]) -> Iterator[tuple[str, TextIO] | int | None]:
    """Yield each line that a slot prints and each message that it sends, until it ends.

    A slot flushes its streams before it sends anything, and prints nothing more until the parent
    answers. So whatever the streams hold by then was printed before.
    """
    while True:
        ready = wait([pipe, *(output.source for output in outputs)])
        try:
            message = pipe.recv() if pipe in ready else None
        except (EOFError, OSError):
            break
        for output in outputs:
            yield from output.lines(all_of_it=pipe in ready)
        outputs = [output for output in outputs if output.is_open]
        if pipe in ready:
            yield message
    deadline = time.monotonic() + SHUTDOWN_GRACE_S  # a job's own child may hold a stream open
    while outputs and (left_s := deadline - time.monotonic()) > 0:
        wait([output.source for output in outputs], timeout=left_s)
        for output in outputs:
            yield from output.lines(all_of_it=False)
        outputs = [output for output in outputs if output.is_open]


def run_slot(slot: Slot, pipe: Connection, stdout: Connection, stderr: Connection) -> None:
    """Run what is left of each batch that arrives; a slot's whole life."""
    ignore_stop_signals()
    if sys.platform == "linux":
        os.sched_setaffinity(0, slot.cores)  # before any thread or process, which inherit it
    tempfile.tempdir = str(slot.temp)
    if slot.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpus
    die_with_launcher()
    for connection, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        os.dup2(connection.fileno(), stream.fileno())
        connection.close()
    start_fork_server()
    headers = chain([slot.number == 1], repeat(False))  # one for the whole sweep
    execute = partial(_launch_in, slot, pipe, headers)
    while (batch := pipe.recv()) is not None:
        try:
            run_jobs(batch, execute=execute, stop_requested=slot.stop.exists)
        except UserError as error:
            print_error(str(error))
            sys.exit(EXIT_USER_ERROR)
        _send(pipe, None)
    os._exit(0)  # skips the second that unloading torch takes


def _launch_in(slot: Slot, pipe: Connection, headers: Iterator[bool], job: Job) -> Outcome:
    _send(pipe, job.number)
    pipe.recv()
    print(job.title, flush=True)
    return launch(replace(job, slot=slot, shows_header=next(headers)))


def _send(pipe: Connection, message: int | None) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(message)
