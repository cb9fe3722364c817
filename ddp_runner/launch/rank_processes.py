"""The processes of this machine's ranks: how they are forked, run their work, and are ended."""

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from torch.numa.binding import NumaOptions

from ddp_runner.host.children import end_adopted
from ddp_runner.job import Job
from ddp_runner.launch.elastic import numa_bound
from ddp_runner.rank.stop import FAILED_GROUP_GRACE_S, die_with_launcher
from ddp_runner.scratch import SAVING_FACTOR, SAVING_POLL_S, Scratch

# From SIGTERM to SIGKILL: a rank ends by itself after its own grace, unless it is suspended.
END_S = FAILED_GROUP_GRACE_S + 1.0
GONE_S = 2.0  # after SIGKILL; a rank in uninterruptible sleep stays, and is left behind
PEER_GRACE_S = 2.0  # a rank that lost a peer waits, so that the peer's end is noticed first


@dataclass(frozen=True)
class RankProcess:
    """A rank, its process, and the pipe on which its result arrives."""

    rank: int
    process: ForkServerProcess
    result: Connection


def start_rank(
    job: Job,
    work: Callable[[Job], dict[str, Any]],
    *,
    environ: Mapping[str, object],
    options: NumaOptions | None,
) -> RankProcess:
    """Fork the process of one rank, which runs `work`, with torchrun's variables in `environ`."""
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    texts = {name: str(value) for name, value in environ.items()}
    process = context.Process(target=_run_rank, args=(job, work, texts, options, sender))
    process.start()
    sender.close()
    return RankProcess(int(texts["RANK"]), process, receiver)


def end_ranks(
    ranks: Sequence[RankProcess],
    scratch: Scratch,
    own_children: Collection[int],
    *,
    patience_s: float,
) -> None:
    """End the ranks that live, and all that ranks have started.

    Args:
        ranks: all ranks of this machine.
        scratch: of their worker group.
        own_children: the processes that this one had started before.
        patience_s: a save may take SAVING_FACTOR times this long.
    """
    processes = [one.process for one in ranks]
    for process in processes:
        if process.is_alive():
            process.terminate()
    wait_for(processes, END_S)
    deadline = time.monotonic() + SAVING_FACTOR * patience_s
    # The restart goes on from the checkpoint that is being written.
    while scratch.saving_is_fresh() and time.monotonic() < deadline:
        if wait_for(processes, SAVING_POLL_S):
            break
    for process in processes:
        if process.is_alive():
            process.kill()
    wait_for(processes, GONE_S)
    for one in ranks:
        one.result.close()
    end_adopted(own_children)


def wait_for(processes: Sequence[ForkServerProcess], timeout_s: float) -> bool:
    """Wait for the processes to end; return whether all have."""
    deadline = time.monotonic() + timeout_s
    while sentinels := [one.sentinel for one in processes if one.is_alive()]:
        if not wait(sentinels, timeout=max(0.0, deadline - time.monotonic())):
            return False
    return True


def _run_rank(
    job: Job,
    work: Callable[[Job], dict[str, Any]],
    environ: dict[str, str],
    options: NumaOptions | None,
    sender: Connection,
) -> None:
    os.environ.update(environ)
    die_with_launcher()
    assert job.scratch is not None
    failure = None
    try:
        sender.send(numa_bound(work, int(environ["LOCAL_RANK"]), options)(job))
    except BaseException as error:  # sys.exit in a model ends a rank just as an error does
        attempt = int(environ["TORCHELASTIC_RESTART_COUNT"])
        failure = job.scratch.record_failure(error, rank=int(environ["RANK"]), attempt=attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    if failure is not None and failure.kind == "peer":
        time.sleep(PEER_GRACE_S)
    # Skips the interpreter's own shutdown: threads may still wait for a lost rank.
    os._exit(0 if failure is None else 1)
