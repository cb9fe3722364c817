"""What a failing rank leaves for the launcher: one small file, so that the first failure is named.

Torch-free, since the launcher reads it. The agent alone would report whichever rank it happened
to notice first, often one that only lost its peer.
"""

import json
import math
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_runner.errors import UserError


@dataclass(frozen=True)
class Failure:
    """How one rank failed: `kind` is user, crash, peer, late or signal."""

    rank: int
    kind: str
    sentence: str
    traceback: str = ""
    time_ns: int = 0


def record_failure(scratch: Path, *, rank: int, attempt: int, error: BaseException) -> Failure:
    """Write down why this rank dies; return what was written."""
    if isinstance(error, UserError):
        kind, sentence = "user", str(error)
    else:
        lost_peer = type(error).__module__.startswith("torch.") or any(
            sign in str(error) for sign in ("gloo", "NCCL", "Connection", "store")
        )
        kind = "peer" if lost_peer and isinstance(error, RuntimeError) else "crash"
        first_line = (str(error).splitlines() or [""])[0]
        sentence = f"rank {rank} raised {type(error).__name__}: {first_line}"
    failure = Failure(
        rank=rank,
        kind=kind,
        sentence=sentence,
        traceback="".join(traceback.format_exception(error)),
        time_ns=time.time_ns(),
    )
    path = scratch / f"failure-{attempt}-{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)))
    path.with_suffix(".tmp").replace(path)
    return failure


def first_failure(scratch: Path, *, attempt: int) -> Failure | None:
    """Return the earliest failure of an attempt, one that is not the loss of a peer if any is."""
    paths = scratch.glob(f"failure-{attempt}-*.json")
    failures = [Failure(**json.loads(path.read_text())) for path in paths]
    return min(failures, key=lambda one: (one.kind == "peer", one.time_ns), default=None)


def note_end(scratch: Path, *, rank: int) -> None:
    """Let a gang that goes on without this rank know that its process has ended."""
    (scratch / f"ended-{rank}").touch()


def ended_ranks(scratch: Path | None) -> set[int]:
    """Return the ranks of this gang whose processes are known to have ended."""
    if scratch is None:
        return set()
    return {int(path.name.removeprefix("ended-")) for path in scratch.glob("ended-*")}


def record_stack(scratch: Path, *, rank: int, attempt: int) -> None:
    """Write down where this rank's main thread stands; the gang has failed and it may be late."""
    main_thread = threading.main_thread().ident
    frame = sys._current_frames().get(main_thread or 0)
    if frame is not None:
        text = "".join(traceback.format_stack(frame))
        (scratch / f"stack-{attempt}-{rank}.txt").write_text(text, encoding="utf-8")


def late_rank(scratch: Path, *, attempt: int, timeout_s: float, world_size: int) -> Failure | None:
    """Return the rank that the others waited for: the lowest that stood still and never failed."""
    late = (
        f"did not reach the collective in which the others waited for backend.timeout_s "
        f"({timeout_s:g} s)"
    )
    failed_at = {
        int(path.stem.split("-")[2]): json.loads(path.read_text())["time_ns"]
        for path in scratch.glob(f"failure-{attempt}-*.json")
    }
    for path in sorted(scratch.glob(f"stack-{attempt}-*.txt")):
        rank = int(path.stem.split("-")[2])
        # One that had failed by then only waited for its peers; one that fails later came too late.
        if failed_at.get(rank, math.inf) < path.stat().st_mtime_ns:
            continue
        stack = path.read_text(encoding="utf-8")
        where = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
        sentence = f"rank {rank} {late}; it stood at {(where or ['?'])[-1]}"
        return Failure(rank=rank, kind="late", sentence=sentence, traceback=stack)
    silent = [rank for rank in range(world_size) if rank not in failed_at]
    if not silent:
        return None
    sentence = f"rank {silent[0]} {late}; it could not even say where it stood: is it stopped?"
    return Failure(rank=silent[0], kind="late", sentence=sentence)
