"""This machine's ranks, for one attempt: start, watch and end them. Torch-free.

``host.wire`` lists the messages of the pipe between a rank and the launcher.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from ddp_runner.host.memory import oom_kills
from ddp_runner.host.processes import (
    children,
    end_descendants,
    fork_server_is_gone,
    is_suspended,
    start_fork_server,
)
from ddp_runner.job import Failure, Job, Outcome
from ddp_runner.launch.failure_cause import FailedAttempt, server_was_killed, stayed_suspended
from ddp_runner.launch.group import OneMachine
from ddp_runner.launch.rank_process import run_rank
from ddp_runner.launch.stop_requests import StopRequests

POLL_S = 0.05
UNKNOWN_CODE = 255  # from multiprocessing once the server is gone; os._exit(255) looks the same
ANSWER_S = 3.0  # after the first failure, for the other ranks to report before they are killed
SAVING_FACTOR = 10  # a save may take this many times launch.shutdown_timeout_s


class Ranks:
    """The ranks of one attempt; `on_claim` gets the run folder once a rank has claimed it."""

    # By name: importing it takes seconds, and the launcher does not use it.
    run_task = "ddp_runner.worker:run_task"

    def __init__(self, job: Job, stop: StopRequests, on_claim: Callable[[Path], object]) -> None:
        self.first_step: int | None = None  # of the training loop; None: it never began
        self.results: dict[int, Outcome] = {}
        self._job, self._stop, self._on_claim = job, stop, on_claim
        self._earlier_children = children()  # not to be killed
        self._oom_kills = oom_kills()
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._failures: dict[int, Failure] = {}
        self._stacks: dict[int, tuple[int, str]] = {}
        self._exit_codes: dict[int, int | None] = {}  # as of the last ``_poll``
        self._saving = set[int]()  # the ranks that write a checkpoint
        self._saved_at = 0.0
        self._is_training = False
        self._has_sent_stop = False

    def run(self, environs: Sequence[Mapping[str, str]], machines: OneMachine) -> Failure | None:
        """Run a rank with each set of torchrun's variables; return this machine's first failure.

        None: all ranks of all machines have ended well.
        """
        try:
            if not self._start(environs):
                return self._collect_failure({}, peers_timed_out=False)
            late_at = math.inf
            while True:
                lost = self._poll()
                if lost or machines.must_end:
                    return self._collect_failure(lost, peers_timed_out=machines.timed_out)
                if late_at == math.inf and (self.results or machines.has_ended):
                    late_at = time.monotonic() + self._job.config.backend.timeout_s
                if None in self._exit_codes.values():
                    # No peer waits in a collective, so none would report a suspended rank.
                    for rank, process in self._processes.items():
                        if time.monotonic() > late_at and is_suspended(process.pid):
                            self._wait_for_answers()  # another rank may be saving
                            return stayed_suspended(rank, self._job.config)
                elif (all_ended := machines.all_ended()) is not None:
                    return None if all_ended else self._collect_failure({}, peers_timed_out=False)
        finally:
            self._end()

    def _start(self, environs: Sequence[Mapping[str, str]]) -> bool:
        """Start a rank with each set of torchrun's variables; return whether all have started."""
        assert self._job.temp is not None
        self._job.temp.mkdir(parents=True, exist_ok=True)  # a cleaner may have removed it
        start_fork_server()  # if it was killed
        for environ in environs:
            has_started = self._fork(environ)
            if not has_started and not self._processes:  # killed during its imports: try again
                fork_server_is_gone(within_s=1.0)
                start_fork_server()
                has_started = self._fork(environ)
            if not has_started:
                rank = int(environ["RANK"])
                self._failures[rank] = server_was_killed(rank)
                return False
        return True

    def _fork(self, environ: Mapping[str, str]) -> bool:
        """Start a rank; return whether the fork server was there to do it."""
        pipe, child_end = Pipe()
        process = ForkServerProcess(
            target=run_rank, args=(self._job, self.run_task, environ, child_end)
        )
        try:
            process.start()  # waits until the server has imported torch
        except (EOFError, OSError):  # the server was killed
            pipe.close()
            return False
        finally:
            child_end.close()
        rank = int(environ["RANK"])
        self._processes[rank], self._pipes[rank] = process, pipe
        self._stop.may_save = True
        return True

    def _poll(self) -> dict[int, int]:
        """Take the ranks' messages, pass on a stop request; return the exit codes of lost ranks."""
        # Before the messages: a rank sends its result, and then ends.
        self._exit_codes = {rank: process.exitcode for rank, process in self._processes.items()}
        self._receive(POLL_S)
        self._stop_if_asked()
        return {
            rank: code
            for rank, code in self._exit_codes.items()
            if code is not None and rank not in self.results
        }

    def _end(self) -> None:
        """Kill the ranks and all their descendants."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
        end_descendants(self._earlier_children)

    def _receive(self, timeout_s: float) -> None:
        """Wait for a message or the end of a rank, and take all messages that have come."""
        # Leave out ranks that have ended: their sentinels are always ready.
        processes = self._processes.values()
        alive = [process.sentinel for process in processes if process.exitcode is None]
        wait([*self._pipes.values(), *alive], timeout=timeout_s)
        for rank, pipe in list(self._pipes.items()):
            try:
                while pipe.poll():
                    self._handle(rank, *pipe.recv())
            except (EOFError, OSError):  # the rank has ended, and its pipe is empty
                pipe.close()
                del self._pipes[rank]
        # The child of a rank that has ended may still hold the pipe open.
        self._saving = {rank for rank in self._saving if self._processes[rank].exitcode is None}

    def _handle(self, rank: int, word: str, *rest: Any) -> None:
        match word, *rest:
            case "claimed", folder:
                self._on_claim(folder)
            case "began", step:
                self.first_step = step
            case ["ready"]:
                self._is_training = True
            case "saving", flag:
                self._saving = self._saving | {rank} if flag else self._saving - {rank}
                self._saved_at = time.monotonic()
            case "result", value:
                self.results[rank] = value
            case "failure", failure:
                self._failures[rank] = failure
            case "stack", time_ns, text:
                self._stacks[rank] = time_ns, text

    def _send(self, rank: int, *message: Any) -> None:
        with suppress(KeyError, OSError):  # the rank has ended
            self._pipes[rank].send(message)

    def _stop_if_asked(self) -> None:
        if self._stop.received is None:
            return
        if not self._has_sent_stop:
            self._has_sent_stop = True
            for rank in self._processes:
                self._send(rank, "stop")
            self._stop.announce(is_training=self._is_training)
        now, limit_s = time.monotonic(), self._job.config.launch.shutdown_timeout_s
        if self._saving:
            self._saved_at = now
        # After the last save, the run has `limit_s` again to end.
        begun_at = max(self._stop.asked_at, self._saved_at)
        if now > min(self._stop.asked_at + SAVING_FACTOR * limit_s, begun_at + limit_s):
            self._stop.end_at_once()

    def _collect_failure(self, lost: Mapping[int, int], *, peers_timed_out: bool) -> Failure:
        """Collect the stacks of all ranks; return the failure that came first."""
        attempt = FailedAttempt(
            self._job.config,
            ranks=list(self._processes),
            exit_codes=lost,
            reports=self._failures,
            stacks=self._stacks,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(
                within_s=1.0 if UNKNOWN_CODE in lost.values() else 0.0
            ),
            peers_timed_out=peers_timed_out,
        )
        for rank in self._processes:
            self._send(rank, "stack")
        self._wait_for_answers()
        return attempt.first_failure()

    def _wait_for_answers(self) -> None:
        """Wait until each rank has ended or failed, and longer for a save: a restart uses it."""
        now, shutdown_s = time.monotonic(), self._job.config.launch.shutdown_timeout_s
        deadline, save_deadline = now + ANSWER_S, now + SAVING_FACTOR * shutdown_s
        while True:
            alive = {rank for rank, process in self._processes.items() if process.exitcode is None}
            self._receive(0.0)
            if alive <= self._failures.keys():
                return
            is_saving = any(not is_suspended(self._processes[rank].pid) for rank in self._saving)
            if time.monotonic() > (save_deadline if is_saving else deadline):
                return
            self._stop_if_asked()
            self._receive(POLL_S)
