"""What a failing rank leaves for the launcher: small files in the scratch folder of its group.

Torch-free, since the launcher reads them: see ``blame``.
"""

import json
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_runner.errors import UserError

# What gloo, NCCL and the store of a group say when another rank is gone or late.
PEER_SIGNS = ("gloo", "NCCL", "Connection", "store", "pair closure")
TIMEOUT_SIGNS = ("imed out", "imeout caused pair closure")  # the rank itself has waited too long


@dataclass(frozen=True)
class Failure:
    """How one rank failed: `kind` is user, crash, peer, late or signal."""

    rank: int
    kind: str
    sentence: str
    traceback: str = ""
    time_ns: int = 0

    @property
    def is_timeout(self) -> bool:
        """Whether the rank has waited for a peer in vain, which is late rather than gone."""
        return self.kind == "peer" and any(sign in self.sentence for sign in TIMEOUT_SIGNS)


def record_failure(scratch: Path, *, rank: int, attempt: int, error: BaseException) -> Failure:
    """Write down why this rank dies; return what was written."""
    if isinstance(error, UserError):
        kind, sentence = "user", str(error)
    else:
        lost_peer = type(error).__module__.startswith("torch.distributed") or any(
            sign in str(error) for sign in PEER_SIGNS
        )
        kind = "peer" if lost_peer and isinstance(error, RuntimeError) else "crash"
        what = [type(error).__name__, *str(error).splitlines()[:1]]
        sentence = f"rank {rank} raised {': '.join(what)}"
    failure = Failure(
        rank=rank,
        kind=kind,
        sentence=sentence,
        traceback="".join(traceback.format_exception(error)),
        time_ns=time.time_ns(),
    )
    _write(scratch / f"failure-{attempt}-{rank}.json", failure)
    return failure


def recorded_failures(scratch: Path, *, attempt: int) -> dict[int, Failure]:
    """Return what the ranks of an attempt have written down, by rank."""
    paths = scratch.glob(f"failure-{attempt}-*.json")
    failures = [Failure(**json.loads(path.read_text())) for path in paths]
    return {failure.rank: failure for failure in failures}


def note_cause(scratch: Path, failure: Failure, *, attempt: int) -> None:
    """Keep for the next attempt's ranks why this one ended."""
    _write(scratch / f"cause-{attempt}.json", failure)


def cause(scratch: Path, *, attempt: int) -> Failure | None:
    """Return why an earlier attempt ended; None where that was no failure of this machine's."""
    path = scratch / f"cause-{attempt}.json"
    return Failure(**json.loads(path.read_text())) if path.exists() else None


def _write(path: Path, failure: Failure) -> None:
    # Where that is impossible the rank ends all the same, and its exit code tells the launcher.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files was here
        path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)))
        path.with_suffix(".tmp").replace(path)


def note_end(scratch: Path, *, rank: int) -> None:
    """Let a gang that goes on without this rank know that its process has ended."""
    (scratch / f"ended-{rank}").touch()


def ended_ranks(scratch: Path | None) -> set[int]:
    """Return the ranks of this gang whose processes are known to have ended."""
    if scratch is None:
        return set()
    return {int(path.name.removeprefix("ended-")) for path in scratch.glob("ended-*")}


def record_stack(scratch: Path, *, rank: int, attempt: int) -> None:
    """Write down where this rank's main thread stands; its group has failed and it may be late."""
    main_thread = threading.main_thread().ident
    frame = sys._current_frames().get(main_thread or 0)
    if frame is not None and scratch.is_dir():
        text = "".join(traceback.format_stack(frame))
        (scratch / f"stack-{attempt}-{rank}.txt").write_text(text, encoding="utf-8")
