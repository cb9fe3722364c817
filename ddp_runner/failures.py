"""What a failing rank leaves for the launcher: one small file, so that the first failure is named.

Torch-free, since the launcher reads it. The agent alone would report whichever rank it happened
to notice first, often one that only lost its peer.
"""

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_runner.errors import UserError


@dataclass(frozen=True)
class Failure:
    """How one rank failed: `kind` is user, crash, peer or signal."""

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
