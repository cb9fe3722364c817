"""The processes of this machine's ranks: how they start, what they return, how they are ended."""

import os
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from ddp_runner.host.processes import (
    children,
    die_with_launcher,
    end_descendants,
    is_suspended,
)
from ddp_runner.job import Job
from ddp_runner.launch.file_wire import FAILED_GROUP_GRACE_S, FileWire
from ddp_runner.launch.ranks import SAVING_FACTOR
from ddp_runner.launch.scratch import SAVING_POLL_S, Scratch
from ddp_runner.launch.wire import PEER_GRACE_S, failure_of
from ddp_runner.rank.numa import bound_to_cores

# From SIGTERM to SIGKILL: a rank ends by itself after its own grace, unless it is suspended.
END_S = FAILED_GROUP_GRACE_S + 1.0
GONE_S = 2.0  # after SIGKILL; a rank in uninterruptible sleep stays, and is left behind


@dataclass(frozen=True)
class RankProcess:
    """A rank, its process, and the pipe on which its result arrives."""

    rank: int
    process: ForkServerProcess
    result: Connection


class RankProcesses:
    """The ranks of one attempt after another, forked from our server."""

    # By name: what a rank imports takes half a second, and the launcher needs none of it.
    work = "ddp_runner.worker:work"

    def __init__(self, job: Job, scratch: Scratch) -> None:
        self._scratch = scratch
        self._patience_s = SAVING_FACTOR * job.config.launch.shutdown_timeout_s
        self._ranks: list[RankProcess] = []
        self._results: dict[int, Any] = {}
        self._own_children = children()  # such as the fork server, also if no rank ever starts

    def start(self, job: Job, environs: Sequence[dict[str, str]]) -> dict[int, Any]:
        """Start a rank with each set of torchrun's variables; return process ids by local rank."""
        self._own_children = children()
        pids = {}
        for environ in environs:
            receiver, sender = Pipe(duplex=False)
            arguments = (job, self._scratch, self.work, environ, sender)
            process = ForkServerProcess(target=_run_rank, args=arguments)
            process.start()
            sender.close()
            self._ranks.append(RankProcess(int(environ["RANK"]), process, receiver))
            pids[int(environ["LOCAL_RANK"])] = process.pid
        return pids

    def exit_codes(self) -> dict[int, int | None]:
        """Return the exit code of each rank; None: it runs."""
        return {one.rank: one.process.exitcode for one in self._ranks}

    def suspended(self) -> list[int]:
        """Return the ranks that are suspended, as by SIGSTOP. Linux only: elsewhere none."""
        return [one.rank for one in self._ranks if is_suspended(one.process.pid)]

    def results(self) -> Mapping[int, Any]:
        """Return the results of the ranks whose work has returned."""
        for one in self._ranks:
            with suppress(EOFError):  # the rank ended without a result
                if one.rank not in self._results and one.result.poll():
                    self._results[one.rank] = one.result.recv()
        return self._results

    def end(self) -> None:
        """End the ranks, and all that they have started."""
        processes = [one.process for one in self._ranks]
        for process in processes:
            if process.is_alive():
                process.terminate()
        _wait_for(processes, END_S)
        deadline = time.monotonic() + self._patience_s
        # The restart goes on from the checkpoint that is being written.
        while self._scratch.saving_is_fresh() and time.monotonic() < deadline:
            if _wait_for(processes, SAVING_POLL_S):
                break
        for process in processes:
            if process.is_alive():
                process.kill()
        _wait_for(processes, GONE_S)
        for one in self._ranks:
            one.result.close()
        end_descendants(self._own_children)
        self._ranks, self._results = [], {}


def _wait_for(processes: Sequence[ForkServerProcess], timeout_s: float) -> bool:
    """Wait for the processes to end; return whether all have."""
    deadline = time.monotonic() + timeout_s
    while sentinels := [one.sentinel for one in processes if one.is_alive()]:
        if not wait(sentinels, timeout=max(0.0, deadline - time.monotonic())):
            return False
    return True


def _run_rank(
    job: Job, scratch: Scratch, work: str, environ: dict[str, str], sender: Connection
) -> None:
    os.environ.update(environ)
    die_with_launcher()
    rank, attempt = int(environ["RANK"]), int(environ["TORCHELASTIC_RESTART_COUNT"])
    wire, failure = FileWire(scratch, rank=rank, attempt=attempt), None
    job = replace(job, wire=wire, temp=scratch.path, earlier=wire.earlier)
    try:
        bound = bound_to_cores(pkgutil.resolve_name(work), int(environ["LOCAL_RANK"]), job.config)
        sender.send(bound(job))
    except BaseException as error:  # sys.exit in a model ends a rank just as an error does
        failure = failure_of(error, rank=rank)
        scratch.record_failure(failure, attempt=attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    if failure is not None and failure.kind == "peer":
        time.sleep(PEER_GRACE_S)
    # Skips the interpreter's own shutdown: threads may still wait for a lost rank.
    os._exit(0 if failure is None else 1)
