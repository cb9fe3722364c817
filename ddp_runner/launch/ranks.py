"""This machine's ranks, for one attempt: how they start, are watched, and end.

Each has a pipe; see ``host.wire``. Torch-free.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from ddp_runner.host.machine_load import oom_kills
from ddp_runner.host.processes import (
    children,
    end_descendants,
    fork_server_is_gone,
    is_suspended,
    start_fork_server,
)
from ddp_runner.job import Failure, Job
from ddp_runner.launch.failure_cause import (
    Ends,
    Stack,
    first_failure,
    server_was_killed,
    stayed_suspended,
)
from ddp_runner.launch.group import OneMachine
from ddp_runner.launch.rank_process import run_rank
from ddp_runner.launch.stop_requests import StopRequests

POLL_S = 0.05
UNKNOWN = 255  # multiprocessing's exit code of a rank whose server is gone, or os._exit's own
ANSWER_S = 3.0  # from the first failure to the end of ranks that do not fail themselves
SAVING_FACTOR = 10  # during a save, an end waits this many times launch.shutdown_timeout_s


class Ranks:
    """The ranks of one attempt.

    Args:
        job: with its temporary folder, and what is known of the attempts before.
        stop: asks for the end of the run.
        claimed: called with the run folder where a rank has claimed it.
    """

    # By name: importing what a rank needs takes seconds, and the launcher needs none of it.
    work = "ddp_runner.worker:work"

    def __init__(self, job: Job, stop: StopRequests, claimed: Callable[[Path], object]) -> None:
        self.first_step: int | None = None  # where the loop began; None: it never got there
        self.results: dict[int, Any] = {}
        self._job, self._stop, self._claimed = job, stop, claimed
        self._own = children()  # such as the fork server, also if no rank ever starts
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._failures: dict[int, Failure] = {}
        self._stacks: dict[int, Stack] = {}
        self._not_started: dict[int, int] = {}  # a rank, and the exit code of one that is lost
        self._seen: dict[int, int | None] = {}  # the exit codes before the last messages
        self._saving: int | None = None  # the rank that writes a checkpoint
        self._saved_at = 0.0
        self._is_training = False
        self._is_asked = False  # to stop

    def run(self, environs: Sequence[Mapping[str, str]], machines: OneMachine) -> Failure | None:
        """Run a rank with each set of torchrun's variables; return the failure that came first.

        It is that of this machine's ranks. None: all ranks of all machines have ended well.
        """
        try:
            self.start(environs)
            late_at = math.inf
            while True:
                lost = self.poll(POLL_S)
                if lost or machines.must_end:
                    return self.failed(lost, peers_waited_in_vain=machines.timed_out)
                if late_at == math.inf and (self.results or machines.has_ended):
                    late_at = time.monotonic() + self._job.config.backend.timeout_s
                if not self.all_ended():
                    # Nobody waits for such a rank in a collective, where it would be noticed.
                    if time.monotonic() > late_at and (suspended := self.suspended()):
                        self._wait_for_answers()  # another one may be saving
                        return stayed_suspended(suspended[0], self._job.config)
                elif (is_over := machines.all_ended()) is not None:
                    return None if is_over else self.failed({}, peers_waited_in_vain=False)
        finally:
            self.end()

    def start(self, environs: Sequence[Mapping[str, str]]) -> None:
        """Start a rank with each set of torchrun's variables; a failure shows in ``poll``."""
        assert self._job.temp is not None
        self._job.temp.mkdir(parents=True, exist_ok=True)  # it may have been cleaned away
        start_fork_server()  # if it was killed
        self._own, self._oom_kills = children(), oom_kills()
        for environ in environs:
            if self._fork(environ):
                continue
            if not self._processes:  # the server was killed while it imported: nothing is lost
                fork_server_is_gone(within_s=1.0)
                start_fork_server()
                if self._fork(environ):
                    continue
            rank = int(environ["RANK"])
            self._failures[rank], self._not_started[rank] = server_was_killed(rank), UNKNOWN
            return

    def _fork(self, environ: Mapping[str, str]) -> bool:
        """Start a rank; return whether the server lived to do so."""
        pipe, theirs = Pipe()
        process = ForkServerProcess(target=run_rank, args=(self._job, self.work, environ, theirs))
        try:
            process.start()  # waits until the server has imported torch
        except (EOFError, OSError):
            pipe.close()
            return False
        finally:
            theirs.close()
        rank = int(environ["RANK"])
        self._processes[rank], self._pipes[rank] = process, pipe
        self._stop.may_save = True
        return True

    def all_ended(self) -> bool:
        """Return whether all ranks had ended at the last ``poll``."""
        return None not in self._seen.values()

    def suspended(self) -> list[int]:
        """Return the ranks that are suspended, as by SIGSTOP. Linux only: elsewhere none."""
        return [rank for rank, one in self._processes.items() if is_suspended(one.pid)]

    def poll(self, timeout_s: float = 0.0) -> dict[int, int]:
        """Take what ranks tell, ask them to stop if that is due; return the lost ones' exit codes.

        Args:
            timeout_s: how long to wait for a message, or for the end of a rank.
        """
        # Before the messages: a rank sends its result, and then ends.
        self._seen = self._exit_codes()
        self._receive(timeout_s)
        self._stop_if_asked()
        ended = {rank: code for rank, code in self._seen.items() if code is not None}
        lost = {rank: code for rank, code in ended.items() if rank not in self.results}
        return lost | self._not_started

    def end(self) -> None:
        """End the ranks, and all that they have started."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
        end_descendants(self._own)

    def _exit_codes(self) -> dict[int, int | None]:
        return {rank: process.exitcode for rank, process in self._processes.items()}

    def _receive(self, timeout_s: float) -> None:
        """Wait for a message or the end of a rank, and take all messages that have come."""
        # Without ranks that have ended: their sentinels are always ready.
        alive = [one.sentinel for one in self._processes.values() if one.exitcode is None]
        wait([*self._pipes.values(), *alive], timeout=timeout_s)
        for rank, pipe in list(self._pipes.items()):
            try:
                while pipe.poll():
                    self._take(rank, *pipe.recv())
            except (EOFError, OSError):  # the rank has ended, and its pipe holds no more
                pipe.close()
                del self._pipes[rank]
        if self._saving is not None and self._processes[self._saving].exitcode is not None:
            self._saving = None  # a child of it may still hold its end of the pipe

    def _take(self, rank: int, word: str, *rest: Any) -> None:
        match word, *rest:
            case "claimed", folder:
                self._claimed(folder)
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

    def failed(self, lost: Mapping[int, int], *, peers_waited_in_vain: bool) -> Failure:
        """Let all ranks say where they are; return the failure that came first."""
        ends = Ends(
            ranks=list(self._processes),
            exit_codes=lost,
            out_of_memory=oom_kills() > self._oom_kills,
            server_is_gone=fork_server_is_gone(within_s=1.0 if UNKNOWN in lost.values() else 0.0),
            peers_waited_in_vain=peers_waited_in_vain,
        )
        for rank in self._processes:
            self._send(rank, "stack")
        self._wait_for_answers()
        return first_failure(ends, self._failures, self._stacks, self._job.config)

    def _wait_for_answers(self) -> None:
        """Wait until each rank has ended or failed, and longer for a save: a restart needs it."""
        now, shutdown_s = time.monotonic(), self._job.config.launch.shutdown_timeout_s
        deadline, last_deadline = now + ANSWER_S, now + SAVING_FACTOR * shutdown_s
        while True:
            exit_codes = self._exit_codes()
            self._receive(0.0)
            if all(code is not None or rank in self._failures for rank, code in exit_codes.items()):
                return
            saving = self._processes[self._saving].pid if self._saving is not None else None
            is_saving = saving is not None and not is_suspended(saving)
            if time.monotonic() > (last_deadline if is_saving else deadline):
                return
            self._stop_if_asked()
            self._receive(POLL_S)
