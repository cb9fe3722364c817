"""Which rank failed first, and how: from what the ranks wrote down and how their processes ended.

A rank that loses a peer fails as well, often before anybody has noticed the peer's end. So a rank
that ended without a word comes before one that only complains about its peers. Torch-free.
"""

import math
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.config.schema import Config
from ddp_runner.job import Failure
from ddp_runner.scratch import recorded_failures


@dataclass(frozen=True)
class Ends:
    """The ranks of one machine, and those that had ended when the first failure was noticed."""

    ranks: Collection[int]
    exit_codes: Mapping[int, int]  # of a lost rank; a signal's number is negative; 0: too early
    out_of_memory: bool = False  # the kernel has killed a process for memory meanwhile
    server_is_gone: bool = False  # the process that they were forked from


def explain(ends: Ends, scratch: Path, config: Config, *, attempt: int) -> Failure:
    """Return the failure that came first. Only once all ranks of the attempt have ended."""
    told = recorded_failures(scratch, attempt=attempt)
    causes = [one for one in told.values() if one.kind != "peer"]
    if causes:
        return min(causes, key=lambda one: one.time_ns)
    silent = [rank for rank in ends.exit_codes if rank not in told]
    complaints = sorted(told.values(), key=lambda one: one.time_ns)
    timed_out = any(one.is_timeout for one in complaints)
    aborted = [rank for rank in silent if ends.exit_codes[rank] == -signal.SIGABRT]
    if aborted and config.backend.name == "nccl":
        # What NCCL's watchdog does to a rank that has waited for backend.timeout_s.
        silent, timed_out = [], True
    if silent:
        return _silent(silent[0], ends)
    if timed_out:
        late = late_rank(ends, scratch, attempt=attempt, timeout_s=config.backend.timeout_s)
        if late is not None:
            return late
    return complaints[0] if complaints else _silent(next(iter(ends.exit_codes)), ends)


def _silent(rank: int, ends: Ends) -> Failure:
    """Return the failure of a rank that ended without a word."""
    exit_code = ends.exit_codes[rank]
    if ends.server_is_gone:
        sentence = (
            "the process that the ranks are forked from was killed, and they with it: from "
            "outside, or by the kernel for want of memory"
        )
        return Failure(rank=rank, kind="signal", sentence=sentence)
    if exit_code >= 0:
        when = " before the run was over" if exit_code == 0 else ""
        sentence = (
            f"rank {rank} ended with exit code {exit_code}{when}, without an exception: by "
            "os._exit, or by a library that ends the process"
        )
        return Failure(rank=rank, kind="crash", sentence=sentence)
    sentence = f"rank {rank} was killed by {_name(-exit_code)}"
    if exit_code == -signal.SIGKILL:
        sentence += (
            ": likely out of memory, the kernel says; use a smaller batch.per_rank"
            if ends.out_of_memory
            else " from outside, or by the kernel for want of memory"
        )
    return Failure(rank=rank, kind="signal", sentence=sentence)


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # a real-time signal has no name


def late_rank(ends: Ends, scratch: Path, *, attempt: int, timeout_s: float) -> Failure | None:
    """Return the rank that the others waited for: the lowest that stood still and never failed."""
    late = (
        f"did not reach the collective in which the others waited for backend.timeout_s "
        f"({timeout_s:g} s)"
    )
    told = recorded_failures(scratch, attempt=attempt)
    for path in sorted(scratch.glob(f"stack-{attempt}-*.txt"), key=_rank_of):
        rank = _rank_of(path)
        # One that had failed by then only waited for its peers; one that fails later came too late.
        failed_at = told[rank].time_ns if rank in told else math.inf
        if rank in ends.exit_codes or failed_at < path.stat().st_mtime_ns:
            continue
        stack = path.read_text(encoding="utf-8")
        where = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
        sentence = f"rank {rank} {late}; it stood at {(where or ['?'])[-1]}"
        return Failure(rank=rank, kind="late", sentence=sentence, traceback=stack)
    silent = sorted(set(ends.ranks) - told.keys() - ends.exit_codes.keys())
    if not silent:
        return None
    sentence = (
        f"rank {silent[0]} {late}; it could not even say where it stood, as if it were stopped"
    )
    return Failure(rank=silent[0], kind="late", sentence=sentence)


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
