"""Which rank failed first, and how: from what the ranks recorded and how their processes ended.

A rank that loses a peer fails as well, often before anybody notices the peer's end. So a rank that
ended without an exception comes before one that only reports the loss of a peer. Torch-free.
"""

import math
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ddp_runner.config.schema import RunConfig
from ddp_runner.scratch import Failure, Scratch


@dataclass(frozen=True)
class Ends:
    """The ranks of one machine, and which had ended when the first failure was noticed."""

    ranks: Collection[int]
    exit_codes: Mapping[int, int]  # of lost ranks; a signal's number is negative; 0: too early
    out_of_memory: bool = False  # the kernel has killed a process for memory meanwhile
    server_is_gone: bool = False  # the process that they were forked from
    peers_waited_in_vain: bool = False  # those on other machines


def first_failure(ends: Ends, scratch: Scratch, config: RunConfig, *, attempt: int) -> Failure:
    """Return the failure that came first. All ranks of the attempt must have ended."""
    recorded = scratch.failures(attempt=attempt)
    own = [failure for failure in recorded.values() if failure.kind != "peer"]
    if own:
        return min(own, key=lambda failure: failure.time_ns)
    silent = [rank for rank in ends.exit_codes if rank not in recorded]
    lost_peer = sorted(recorded.values(), key=lambda failure: failure.time_ns)
    timed_out = ends.peers_waited_in_vain or any(one.is_timeout for one in lost_peer)
    aborted = [rank for rank in silent if ends.exit_codes[rank] == -signal.SIGABRT]
    if aborted and config.backend.name == "nccl":
        # NCCL's watchdog aborts a rank that has waited for backend.timeout_s.
        silent, timed_out = [], True
    if silent:
        return _without_exception(silent[0], ends)
    if timed_out:
        late = _late_rank(ends, scratch, attempt=attempt, timeout_s=config.backend.timeout_s)
        if late is not None:
            return late
    if lost_peer:
        return lost_peer[0]
    if ends.exit_codes:
        return _without_exception(next(iter(ends.exit_codes)), ends)
    return Failure(
        rank=min(ends.ranks), kind="peer", sentence="the ranks of another machine have failed"
    )


def _without_exception(rank: int, ends: Ends) -> Failure:
    exit_code = ends.exit_codes[rank]
    if ends.server_is_gone:
        sentence = (
            "the process that the ranks are forked from was killed, and the ranks with it: by "
            "another process, or by the kernel's out-of-memory killer"
        )
        return Failure(rank=rank, kind="signal", sentence=sentence)
    if exit_code >= 0:
        when = " before the run was over" if exit_code == 0 else ""
        sentence = (
            f"rank {rank} ended with exit code {exit_code}{when}, without an exception: by "
            "os._exit, or by a library that ends the process"
        )
        return Failure(rank=rank, kind="crash", sentence=sentence)
    names = {one.value: one.name for one in signal.Signals}  # real-time signals have no names
    sentence = f"rank {rank} was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
    if exit_code == -signal.SIGKILL:
        sentence += (
            ": likely out of memory, as the kernel reports; use a smaller batch.per_rank"
            if ends.out_of_memory
            else ", by another process or by the kernel's out-of-memory killer"
        )
    return Failure(rank=rank, kind="signal", sentence=sentence)


def _late_rank(ends: Ends, scratch: Scratch, *, attempt: int, timeout_s: float) -> Failure | None:
    """Return the rank that the others waited for: the lowest that never failed by itself."""
    late = (
        f"did not reach the collective in which the others waited for backend.timeout_s "
        f"({timeout_s:g} s)"
    )
    recorded = scratch.failures(attempt=attempt)
    for rank, path in scratch.stacks(attempt=attempt).items():
        # A rank that had failed before it wrote its stack only waited for peers; one that failed
        # afterwards came too late.
        failed_at = recorded[rank].time_ns if rank in recorded else math.inf
        if rank in ends.exit_codes or failed_at < path.stat().st_mtime_ns:
            continue
        stack = path.read_text(encoding="utf-8")
        frames = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
        sentence = f"rank {rank} {late}; it was at {(frames or ['?'])[-1]}"
        return Failure(rank=rank, kind="late", sentence=sentence, traceback=stack)
    silent = sorted(set(ends.ranks) - recorded.keys() - ends.exit_codes.keys())
    if not silent:
        return None
    sentence = f"rank {silent[0]} {late}; no stack could be read: the process may be suspended"
    return Failure(rank=silent[0], kind="late", sentence=sentence)
