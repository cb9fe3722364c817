"""Parallel jobs of a sweep: each slot is a process on its own cores and GPUs.

A slot is a launcher with its own fork server. It shares the sweep with the other slots by the locks
of the jobs' folders, as any two launchers do. Its parent sends it the batches, each of which it
answers with None at its end, and SIGTERM as the request to stop. It ends with its parent. What it
prints begins with the number of its job.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware, core_shares, gpu_shares
from ddp_runner.host.processes import (
    die_with_launcher,
    ignore_stop_signals,
    kill_descendants,
    start_fork_server,
    stop_signals_held,
)
from ddp_runner.host.streams import keep_streams
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Slot, Status
from ddp_runner.launch.launcher import launch, print_error
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.sweep.jobs import JobBatch, ended_jobs, run_left

SHUTDOWN_GRACE_S = 10.0  # from the end of the work to that of a slot
POLL_S = 0.05  # between two checks for a request to stop


class Slots:
    """The slots of a sweep, from their start to ``close``."""

    def __init__(self, num_slots: int, hardware: Hardware) -> None:
        self._temp = temp_folder()
        cores = core_shares(num_slots, num_cores=hardware.num_cores)
        gpus = gpu_shares(num_slots, hardware)
        self._slots: dict[Connection, SpawnProcess] = {}
        try:
            for number in range(num_slots):
                self._start(Slot(number + 1, cores[number], gpus[number], self._temp))
        except BaseException:  # such as a signal: no slot has begun a job
            kill_descendants()
            raise

    def run(self, batch: JobBatch) -> dict[str, Outcome]:
        """Run a batch to its end; return how each job ended, and a signal that stopped it."""
        stop = StopRequests(running=lambda: self._running(batch))
        stop.may_save = True
        is_told = False
        with stop.handled():
            for pipe in self._slots:
                with suppress(OSError):  # the slot has ended, as its pipe tells below
                    pipe.send(batch)
            working = set(self._slots)
            while working:
                if stop.is_asked and not is_told:
                    is_told = True
                    stop.say(is_training=bool(self._running(batch)))
                    for pipe in working:
                        self._slots[pipe].terminate()
                for pipe in working & set(wait(working, timeout=POLL_S)):
                    working.remove(pipe)
                    try:
                        pipe.recv()
                    except (EOFError, OSError):
                        process = self._slots.pop(pipe)
                        process.join()
                        if not stop.is_asked:
                            print_error(
                                f"a slot of the sweep ended with exit code {process.exitcode}; the "
                                "other slots take its jobs; if any are left, give the same "
                                "command again"
                            )
        outcomes = ended_jobs(batch)
        if stop.received is not None:
            outcomes["signal"] = Outcome(Status.PREEMPTED, 128 + stop.received)
        elif len(outcomes) < len(batch.jobs) and not batch.is_over(batch.failures(outcomes)):
            # All slots have ended early; each has printed why.
            outcomes["slots"] = Outcome(Status.FAILED, EXIT_FAILED)
        return outcomes

    def _running(self, batch: JobBatch) -> list[Path]:
        """Return the folders of the jobs that slots run."""
        slots = {(process.pid, socket.gethostname()) for process in self._slots.values()}
        folders = (one.run_dir for one in batch.jobs.values())
        return [one.path for one in folders if one.holder_process in slots]

    def close(self) -> None:
        """End all slots."""
        for pipe, process in self._slots.items():
            with suppress(OSError):
                pipe.send(None)
            process.join(SHUTDOWN_GRACE_S)
            process.kill()

    def _start(self, slot: Slot) -> None:
        pipe, child_end = multiprocessing.Pipe()
        with stop_signals_held():
            process = SpawnProcess(target=run_slot, args=(slot, child_end))
            process.start()
            self._slots[pipe] = process
        child_end.close()


def run_slot(slot: Slot, pipe: Connection) -> None:
    """Run what is left of each batch that arrives; a slot's whole life."""
    # Ctrl-C reaches every process of a terminal. The parent decides, and sends SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ignore_stop_signals(but=signal.SIGTERM)
    if sys.platform == "linux":
        os.sched_setaffinity(0, slot.cores)  # before any thread or process, which inherit it
    tempfile.tempdir = str(slot.temp)
    os.environ.update(slot.gpus)
    die_with_launcher()
    keep_streams(prefix=f"[slot {slot.number}] ")
    start_fork_server()
    headers = chain([slot.number == 1], repeat(False))  # one for the whole sweep
    execute = partial(_launch_in, slot, headers)
    while (batch := pipe.recv()) is not None:
        try:
            run_left(batch, execute=execute)
        except UserError as error:
            print_error(str(error))
            sys.exit(EXIT_USER_ERROR)
        pipe.send(None)
    os._exit(0)  # skips the second that unloading torch takes


def _launch_in(slot: Slot, headers: Iterator[bool], job: Job) -> Outcome:
    job = replace(job, slot=slot, shows_header=next(headers))
    keep_streams(prefix=job.line_prefix)
    print(job.title, flush=True)
    return launch(job)
