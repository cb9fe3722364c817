"""A gang that outlives the loss of a rank which only serves the training loop; used by ``launch``.

Torch's elastic agent ends a gang as soon as one of its ranks is gone, which is right for all modes
but this: a parameter server goes on with the trainers that are left.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from ddp_runner.failures import note_end
from ddp_runner.job import READY, Job

LAST_WORDS_S = 10.0  # from the end of rank 0 to the end of the others


class RankLostError(Exception):
    """A rank that the gang cannot do without has ended."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} ended with exit code {exit_code}")
        self.rank, self.exit_code = rank, exit_code


@dataclass(frozen=True)
class _Rank:
    process: ForkServerProcess
    result: Connection


def run_gang(job: Job, work: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """Run all ranks on this machine; return rank 0's result.

    A lost gang is started again as often as `launch.max_restarts` allows.

    Raises:
        RankLostError: rank 0 ended early, or any rank before the loop had begun.
    """
    assert job.scratch is not None
    for attempt in range(job.config.launch.max_restarts + 1):
        for path in [job.scratch / READY, *job.scratch.glob("ended-*")]:
            path.unlink(missing_ok=True)
        ranks = [_start(job, work, rank, attempt) for rank in range(job.config.world_size)]
        try:
            return _watch(job, ranks)
        except RankLostError:
            if attempt == job.config.launch.max_restarts:
                raise
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
    raise AssertionError("unreachable")


def _watch(job: Job, ranks: list[_Rank]) -> dict[str, Any]:
    assert job.scratch is not None
    running = dict(enumerate(ranks))
    while 0 in running:
        wait([one.process.sentinel for one in running.values()])
        for rank, one in list(running.items()):
            if one.process.is_alive():
                continue
            del running[rank]
            note_end(job.scratch, rank=rank)
            is_vital = rank == 0 or not (job.scratch / READY).exists()
            if one.process.exitcode and is_vital:
                raise RankLostError(rank, one.process.exitcode)
    deadline = time.monotonic() + LAST_WORDS_S
    for one in running.values():
        one.process.join(max(0.0, deadline - time.monotonic()))
    result: dict[str, Any] = ranks[0].result.recv()
    return result


def _start(job: Job, work: Callable[[Job], dict[str, Any]], rank: int, attempt: int) -> _Rank:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    world_size = str(job.config.world_size)
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_rank, args=(job, work, environ, sender))
    process.start()
    sender.close()
    return _Rank(process, receiver)


def _run_rank(
    job: Job, work: Callable[[Job], dict[str, Any]], environ: dict[str, str], sender: Connection
) -> None:
    os.environ.update(environ)
    try:
        sender.send(work(job))
    except Exception:
        os._exit(1)  # work has written the reason down
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that still talk to a lost rank
