"""Jobs of a sweep side by side, each slot a process on cores and GPUs of its own.

Used by ``multirun`` where `sweep.parallel_jobs` is more than 1. A slot is a launcher with a fork
server of its own, and shares the sweep with the others by its ledger, as any two launchers do. All
it hears comes from the process that started it, and it dies with that one.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TextIO

from ddp_runner.config.schema import SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware, core_shares, gpu_shares
from ddp_runner.host.signals import signals_ignored
from ddp_runner.host.temp_folder import share_temp_folder, temp_folder
from ddp_runner.job import EXIT_USER_ERROR, Job, Outcome, Slot
from ddp_runner.launch.execute import execute, print_error
from ddp_runner.launch.fork_server import start_fork_server
from ddp_runner.launch.signals import Interrupts
from ddp_runner.rank.stop import die_with_launcher
from ddp_runner.scratch import STOP
from ddp_runner.sweep.jobs import run_jobs
from ddp_runner.sweep.ledger import Ledger

MARK = "\x1e"  # opens a line for the reader: the number of the job that begins, none at the end
END_S = 10.0  # from the end of the work to that of a slot, or of what it says


@dataclass(frozen=True)
class Batch:
    """What every slot is given: the jobs of which each takes one after another."""

    jobs: Mapping[str, Job]
    ledger: Ledger
    settings: SweepConfig
    known_failures: Collection[str]


class Slots:
    """So many slots, from their start to ``close``."""

    def __init__(self, num_slots: int, hardware: Hardware) -> None:
        self._folder = temp_folder()
        self._speaking = threading.Lock()
        self._current: dict[int, int] = {}  # the number of the job that each slot has begun
        self._heard_out = threading.Semaphore(0)  # readers that have shown all of a batch
        cores = core_shares(num_slots, num_cores=hardware.num_cores)
        gpus = gpu_shares(num_slots, num_gpus=hardware.num_gpus)
        self._slots = dict(
            self._start(Slot(number + 1, cores[number], gpus[number], self._folder))
            for number in range(num_slots)
        )

    def run(self, batch: Batch) -> int | None:
        """Run a batch to its end; return the signal that stopped it, None if none did."""
        folders = {job.number: job.run_dir for job in batch.jobs.values() if job.run_dir}

        def running() -> list[Path]:
            numbers = set(self._current.values())
            return [folder for number, folder in folders.items() if number in numbers]

        timeout_s = max(job.config.launch.shutdown_timeout_s for job in batch.jobs.values())
        with Interrupts(self._folder, timeout_s=timeout_s, running=running) as interrupts:
            links = list(self._slots)
            for link in links:
                try:
                    link.send(batch)
                except OSError:
                    self._bury(link)
            working = list(self._slots)
            while working:
                ready = wait(working)
                for link in [one for one in working if one in ready]:
                    working.remove(link)
                    try:
                        link.recv()
                    except (EOFError, OSError):
                        self._bury(link)
            for _ in range(2 * len(links)):
                self._heard_out.acquire(timeout=END_S)
        return interrupts.received

    def close(self) -> None:
        """End all slots."""
        for link, process in self._slots.items():
            link.close()
            process.join(END_S)
            process.kill()

    def _start(self, slot: Slot) -> tuple[Connection, SpawnProcess]:
        link, far_link = multiprocessing.Pipe()
        (out, far_out), (err, far_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        context = multiprocessing.get_context("spawn")
        with signals_ignored():
            process = context.Process(target=serve, args=(slot, far_link, far_out, far_err))
            process.start()
        for far in (far_link, far_out, far_err):
            far.close()
        for source, stream in ((out, sys.stdout), (err, sys.stderr)):
            reading = (slot, source, stream)
            threading.Thread(target=self._pass_on, args=reading, daemon=True).start()
        return link, process

    def _pass_on(self, slot: Slot, source: Connection, stream: TextIO) -> None:
        """Show each line that a slot writes, with the number of its job in front."""
        who = f"slot {slot.number}"
        with os.fdopen(os.dup(source.fileno()), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line == f"{MARK}\n":
                    self._heard_out.release()
                elif line.startswith(MARK):
                    who = line.removeprefix(MARK).strip()
                    self._current[slot.number] = int(who)
                elif line.strip():
                    with self._speaking:
                        stream.write(f"[{who}] {line.rstrip()}\n")
                        stream.flush()
        self._heard_out.release()  # a slot that has died says no more

    def _bury(self, link: Connection) -> None:
        process = self._slots.pop(link)
        process.join()
        print_error(
            f"a slot of the sweep ended with exit code {process.exitcode}; the others go on with "
            "its jobs, or the same command does when it is given again"
        )


def serve(slot: Slot, link: Connection, stdout: Connection, stderr: Connection) -> None:
    """Run what is left of each batch; a slot's whole life."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, slot.cores)  # before any thread or process, which inherit it
    share_temp_folder(slot.folder)
    if slot.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpus
    die_with_launcher()
    for connection, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        os.dup2(connection.fileno(), stream.fileno())
        connection.close()
    start_fork_server()
    headers = chain([slot.number == 1], repeat(False))  # one for the whole sweep
    while True:
        try:
            batch: Batch = link.recv()
        except EOFError:
            os._exit(0)  # without the second that torch takes to be unloaded
        try:
            run_jobs(
                batch.jobs,
                ledger=batch.ledger,
                settings=batch.settings,
                execute=partial(_execute, slot=slot, headers=headers),
                known_failures=batch.known_failures,
                stop_requested=(slot.folder / STOP).exists,
            )
        except UserError as error:
            print_error(str(error))
            sys.exit(EXIT_USER_ERROR)
        _mark("")
        link.send(None)


def _execute(job: Job, *, slot: Slot, headers: Iterator[bool]) -> Outcome:
    _mark(str(job.number))
    print(job.title, flush=True)
    return execute(replace(job, slot=slot, shows_header=next(headers)))


def _mark(number: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        print(f"\n{MARK}{number}", file=stream, flush=True)  # on a line of its own in any case
