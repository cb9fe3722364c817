"""Runs the jobs of a sweep on this machine: one after the other, or in parallel slots.

A slot is a launcher on its own cores and GPUs. Slots share the sweep through the locks of the jobs'
folders, as any launchers do. The parent sends batches through a pipe, and SIGTERM to stop. The slot
answers None after each batch, ends with its parent, and starts its lines with the job's number.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import VISIBLE, core_shares, detect, gpu_shares
from ddp_runner.host.processes import (
    die_with_parent,
    ignore_stop_signals,
    start_fork_server,
    stop_signals_held,
)
from ddp_runner.host.streams import keep_streams, line_width, print_line, shortened
from ddp_runner.host.temp_folder import temp_folder
from ddp_runner.job import EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Slot, Status
from ddp_runner.launch.launcher import launch, print_error
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.sweep.jobs import JobBatch, JobHardware, run_jobs

SHUTDOWN_GRACE_S = 10.0  # from SIGTERM to SIGKILL, at the end of the sweep
POLL_S = 0.05  # between two checks for a stop request


class Local:
    """This machine; ``hydra/launcher=ddp_runner``."""

    def __init__(self) -> None:
        self._hardware = detect()
        self._headers = chain([True], repeat(False))  # one header for the whole sweep
        self._slots: dict[Connection, SpawnProcess] = {}

    def validate(self, config: Config) -> None:
        """Raise a UserError if this machine cannot run a sweep with these settings."""
        launch, hardware, slots = config.launch, self._hardware, config.sweep.parallel_jobs
        if launch.nnodes > 1:
            raise UserError(
                f"launch.nnodes ({launch.nnodes}) must be 1 in a sweep on this machine",
                "write hydra/launcher=slurm, or start each job with its own command, without -m",
            )
        jobs = f"sweep.parallel_jobs ({slots})"
        if slots < 1:
            raise UserError(f"{jobs} must be greater than 0")
        if slots == 1:
            return
        if launch.init_method is not None:
            raise UserError(
                f"{jobs} would let several jobs meet at the same address, launch.init_method "
                f"({launch.init_method})",
                "leave one of the two keys out",
            )
        if config.sweep.calibrate:
            raise UserError(
                f"sweep.calibrate measures all_reduce, and {jobs} would disturb it",
                "leave one of the two keys out",
            )
        if sys.platform != "linux":
            raise UserError(
                f"{jobs} gives each job its own cores, which only works on Linux", "leave it out"
            )
        if slots > hardware.num_cores:
            raise UserError(
                f"{jobs} is more than the {hardware.num_cores} cores that this process may use",
                f"write {hardware.num_cores} or fewer",
            )
        if not hardware.num_gpus or config.backend.device == "cpu":
            return
        if slots > hardware.num_gpus:
            raise UserError(
                f"{jobs} is more than the {hardware.num_gpus} GPUs that its jobs use",
                f"write {hardware.num_gpus} or fewer, or backend.device=cpu",
            )
        if hardware.kind not in VISIBLE:
            raise UserError(
                f"{jobs} can share {' and '.join(VISIBLE)} devices, not {hardware.kind}",
                "leave it out, or write backend.device=cpu",
            )

    def hardware_of(self, config: Config) -> JobHardware:
        """Return the job's share of this machine."""
        return self._hardware.share(config.sweep.parallel_jobs), None

    def layout(self, config: RunConfig) -> tuple[int, int]:
        """Return the number of nodes, and of ranks on each."""
        return 1, config.num_processes

    def run(self, batch: JobBatch) -> Mapping[str, Outcome]:
        """Run a batch; return the outcome of each job by its id.

        A signal that ended the batch is an outcome, too: its key is not the id of a job.
        """
        parallel_jobs = batch.settings.parallel_jobs
        if parallel_jobs == 1:
            start_fork_server()
            return run_jobs(batch, execute=self._execute)
        if not self._slots:
            self._start_slots(parallel_jobs)
        return self._run_in_slots(batch)

    def close(self) -> None:
        """End the slots."""
        for process in self._slots.values():
            process.terminate()
        for process in self._slots.values():
            process.join(SHUTDOWN_GRACE_S)
            process.kill()

    def _execute(self, job: Job) -> Outcome:
        """Run a job. On a terminal, its result replaces the progress line of rank 0."""
        width = line_width(sys.stdout)
        if not width:
            print(f"\n{job.title}", flush=True)
        outcome = launch(replace(job, shows_header=next(self._headers)))
        if width and outcome.status == Status.FAILED:
            print_line(f"{shortened(job.title, width - 8)}  failed")
        return outcome

    def _start_slots(self, num_slots: int) -> None:
        """Start the slots, each on its share of the cores and GPUs."""
        temp = temp_folder()
        cores = core_shares(num_slots, num_cores=self._hardware.num_cores)
        gpus = gpu_shares(num_slots, self._hardware)
        for number in range(num_slots):
            pipe, child_end = multiprocessing.Pipe()
            slot = Slot(number + 1, cores[number], gpus[number], temp)
            with stop_signals_held():
                process = SpawnProcess(target=run_slot, args=(slot, child_end))
                process.start()
                self._slots[pipe] = process
            child_end.close()

    def _run_in_slots(self, batch: JobBatch) -> dict[str, Outcome]:
        """Run a batch; return the outcomes of its jobs, and of a signal that stopped it."""
        stop = StopRequests(running=lambda: self._running(batch))
        stop.may_save = True
        is_stopping = False
        with stop.handled():
            for pipe, process in self._slots.items():
                if process.is_alive():
                    pipe.send(batch)
            working = set(self._slots)
            while working:
                if stop.received is not None and not is_stopping:
                    is_stopping = True
                    stop.announce(is_training=bool(self._running(batch)))
                    for pipe in working:
                        self._slots[pipe].terminate()
                for pipe in working & set(wait(working, timeout=POLL_S)):
                    working.remove(pipe)
                    try:
                        pipe.recv()
                    except (EOFError, OSError):  # the slot has ended
                        process = self._slots.pop(pipe)
                        process.join()
                        if stop.received is None:
                            print_error(
                                f"a slot of the sweep ended with exit code {process.exitcode}; the "
                                "other slots take its jobs; if any jobs remain, give the same "
                                "command again"
                            )
        outcomes = batch.outcomes()
        if stop.received is not None:
            outcomes["signal"] = Outcome.stopped(stop.received)
        elif len(outcomes) < len(batch.jobs) and not batch.must_stop(batch.num_failures(outcomes)):
            # All slots have ended early, and each has printed the reason.
            outcomes["slots"] = Outcome(Status.FAILED, EXIT_FAILED)
        return outcomes

    def _running(self, batch: JobBatch) -> list[Path]:
        """Return the folders of the jobs that the slots run."""
        holders = {(process.pid, socket.gethostname()) for process in self._slots.values()}
        run_dirs = (job.run_dir for job in batch.jobs.values())
        return [run_dir.path for run_dir in run_dirs if run_dir.holder_process in holders]


def run_slot(slot: Slot, pipe: Connection) -> None:
    """Run the batches from the pipe until SIGTERM; the main function of a slot's process."""
    # Ctrl-C reaches every process of a terminal. The parent decides, and sends SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ignore_stop_signals(but=signal.SIGTERM)
    if sys.platform == "linux":  # first: threads and processes inherit it
        os.sched_setaffinity(0, slot.cores)
    tempfile.tempdir = str(slot.temp)
    os.environ.update(slot.gpus)
    die_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is None or not launcher.is_alive():  # it was killed before the line above
        sys.exit(EXIT_FAILED)
    keep_streams(prefix=f"[slot {slot.number}] ")
    start_fork_server()
    headers = chain([slot.number == 1], repeat(False))  # one header for the whole sweep

    def execute(job: Job) -> Outcome:
        job = replace(job, slot=slot, shows_header=next(headers))
        keep_streams(prefix=job.line_prefix)
        print(job.title, flush=True)
        return launch(job)

    while True:
        batch = pipe.recv()
        try:
            run_jobs(batch, execute=execute)
        except UserError as error:
            print_error(str(error))
            sys.exit(EXIT_USER_ERROR)
        pipe.send(None)
