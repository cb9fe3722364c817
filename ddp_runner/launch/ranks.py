"""The ranks of a run on one machine, for one attempt: how they start, are watched, and end.

Each has a pipe; see ``wire``. Torch-free.
"""

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from ddp_runner.config.schema import is_asynchronous
from ddp_runner.host.load import oom_kills
from ddp_runner.host.processes import (
    children,
    end_descendants,
    fork_server_is_gone,
    is_suspended,
    start_fork_server,
)
from ddp_runner.job import Failure, Job
from ddp_runner.launch.blame import Ends, Stack, first_failure, server_was_killed
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.launch.wire import run_rank

POLL_S = 0.05
# multiprocessing's exit code of a rank whose server is gone, or os._exit's own.
UNKNOWN = 255
ANSWER_S = 3.0  # from the first failure to the end of ranks that do not fail themselves
SERVING_GRACE_S = 10.0  # from the end of rank 0 to that of the ranks that only serve it
SAVING_FACTOR = 10  # during a save, an end waits this many times launch.shutdown_timeout_s
ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Ranks:
    """One attempt of a job; ``run`` is its whole life.

    Args:
        job: with its temporary folder, and what is known of the attempts before.
        stop: asks for the end of the run.
        attempt: from 0.
    """

    # By name: importing what a rank needs takes seconds, and the launcher needs none of it.
    work = "ddp_runner.worker:work"

    def __init__(self, job: Job, stop: StopRequests, *, attempt: int) -> None:
        self.first_step: int | None = None  # where the loop began; None: it never got there
        self.results: dict[int, Any] = {}
        self._job, self._stop, self._attempt = job, stop, attempt
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._failures: dict[int, Failure] = {}
        self._stacks: dict[int, Stack] = {}
        self._saving: int | None = None  # the rank that writes a checkpoint
        self._saved_at = 0.0
        self._is_training = False
        self._is_asked = False  # to stop
        self._told = set[int]()  # the lost ranks that rank 0 knows of
        # Whether the run goes on when a rank that serves the loop is lost.
        self._outlives_trainers = is_asynchronous(job.config.parallelism)

    def run(self) -> Failure | None:
        """Start the ranks and wait for the end of all; return the failure that came first."""
        start_fork_server()  # if it was killed
        own = children()
        try:
            self._start()
            return self._watch()
        except (EOFError, ConnectionError):  # of ``process.start``
            return server_was_killed(0)
        finally:
            for pipe in self._pipes.values():
                pipe.close()
            end_descendants(own)

    def _start(self) -> None:
        assert self._job.temp is not None
        self._job.temp.mkdir(parents=True, exist_ok=True)  # it may have been cleaned away
        self._oom_kills, run_id = oom_kills(), uuid.uuid4().hex
        for rank in range(self._job.config.world_size):
            try:
                self._fork(rank, run_id)
            except (EOFError, ConnectionError):
                if self._processes:
                    raise
                fork_server_is_gone(within_s=1.0)  # it was killed while it imported
                start_fork_server()
                self._fork(rank, run_id)

    def _fork(self, rank: int, run_id: str) -> None:
        pipe, theirs = Pipe()
        arguments = (self._job, self.work, self._environ(rank, run_id), theirs)
        process = ForkServerProcess(target=run_rank, args=arguments)
        with theirs:
            process.start()  # waits until the server has imported torch
        self._processes[rank], self._pipes[rank] = process, pipe
        self._stop.has_ranks = True

    def _environ(self, rank: int, run_id: str) -> dict[str, str]:
        """Return the variables that torchrun sets for a rank."""
        config = self._job.config
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": config.world_size,
            "LOCAL_WORLD_SIZE": config.world_size,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "localhost",  # ranks meet at a file, and never use it
            "MASTER_PORT": 0,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": config.launch.max_restarts,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            # Torch's agent sets it too: a rank that waits too long in NCCL is aborted.
            ASYNC_ERROR_HANDLING: os.environ.get(ASYNC_ERROR_HANDLING, "1"),
        }
        return {name: str(value) for name, value in variables.items()}

    def _watch(self) -> Failure | None:
        late_at = None
        while True:
            # Before the messages: a rank's result comes before its end, and is looked for after it.
            exit_codes = self._exit_codes()
            self._receive(POLL_S)
            self._stop_if_asked()
            lost = {
                rank: code
                for rank, code in exit_codes.items()
                if code is not None and rank not in self.results
            }
            if self._outlives_trainers and self._is_training:
                for rank in lost.keys() - self._told:
                    self._told.add(rank)
                    self._send(0, "lost", rank)
                lost = {rank: code for rank, code in lost.items() if rank == 0}
            if lost:
                return self._failed(lost)
            needed = [0] if self._outlives_trainers else list(exit_codes)
            if all(exit_codes[rank] is not None for rank in needed):
                self._wait_for_all(SERVING_GRACE_S)
                return None
            # Nobody waits for such a rank in a collective, where it would be noticed.
            if self.results and late_at is None:
                late_at = time.monotonic() + self._job.config.backend.timeout_s
            if late_at and time.monotonic() > late_at:
                suspended = [rank for rank, one in self._processes.items() if is_suspended(one.pid)]
                if suspended:
                    return self._failed(lost, suspended=suspended[0])

    def _exit_codes(self) -> dict[int, int | None]:
        return {rank: process.exitcode for rank, process in self._processes.items()}

    def _receive(self, timeout_s: float) -> None:
        """Wait for a message or the end of a rank, and take all messages that have come."""
        # Not what is always ready: the pipes and sentinels of ranks that have ended.
        alive = [one.sentinel for one in self._processes.values() if one.exitcode is None]
        wait([*self._pipes.values(), *alive], timeout=timeout_s)
        for rank, pipe in list(self._pipes.items()):
            try:
                while pipe.poll():
                    self._take(rank, *pipe.recv())
            except (EOFError, OSError):  # the rank has ended, and its pipe holds no more
                pipe.close()
                del self._pipes[rank]
                if self._saving == rank:
                    self._saving = None

    def _take(self, rank: int, word: str, *rest: Any) -> None:
        match word, *rest:
            case "began", step:
                self.first_step = step
            case ["ready"]:
                self._is_training = True
            case "saving", flag:
                self._saving, self._saved_at = rank if flag else None, time.monotonic()
            case "result", value:
                self.results[rank] = value
            case "failure", failure:
                self._failures[rank] = failure
            case "stack", time_ns, text:
                self._stacks[rank] = Stack(time_ns, text)

    def _send(self, rank: int, *message: Any) -> None:
        with suppress(KeyError, OSError):  # the rank has ended
            self._pipes[rank].send(message)

    def _stop_if_asked(self) -> None:
        if not self._stop.is_asked:
            return
        if not self._is_asked:
            self._is_asked = True
            for rank in self._processes:
                self._send(rank, "stop")
            self._stop.say(is_training=self._is_training)
        now, limit_s = time.monotonic(), self._job.config.launch.shutdown_timeout_s
        if self._saving is not None:
            self._saved_at = now
        # After the last save, the run has the time again to end.
        begun = max(self._stop.asked_at, self._saved_at)
        if now > min(self._stop.asked_at + SAVING_FACTOR * limit_s, begun + limit_s):
            self._stop.end_at_once()

    def _failed(self, lost: Mapping[int, int], *, suspended: int | None = None) -> Failure:
        """End all ranks; return the failure that came first."""
        ends = Ends(
            ranks=list(self._processes),
            exit_codes=lost,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(within_s=1.0 if UNKNOWN in lost.values() else 0.0),
        )
        for rank in self._processes:
            self._send(rank, "stack")
        self._wait_for_all(ANSWER_S, or_failures=True)
        config = self._job.config
        if suspended is not None:
            limit_s = config.backend.timeout_s
            sentence = (
                f"rank {suspended} is suspended, and has not ended within backend.timeout_s "
                f"({limit_s:g} s) of the others"
            )
            return Failure(rank=suspended, kind="late", sentence=sentence)
        return first_failure(ends, self._failures, self._stacks, config)

    def _wait_for_all(self, limit_s: float, *, or_failures: bool = False) -> None:
        """Wait until each rank has ended or failed, and longer for a save: a restart needs it."""
        now = time.monotonic()
        deadline = now + limit_s
        last_deadline = now + SAVING_FACTOR * self._job.config.launch.shutdown_timeout_s
        while True:
            exit_codes = self._exit_codes()
            self._receive(0.0)
            known = self._failures if or_failures else {}
            if all(code is not None or rank in known for rank, code in exit_codes.items()):
                return
            now = time.monotonic()
            is_saving = self._saving is not None and not is_suspended(
                self._processes[self._saving].pid
            )
            if now > (last_deadline if is_saving else deadline):
                return
            self._stop_if_asked()
            self._receive(POLL_S)
