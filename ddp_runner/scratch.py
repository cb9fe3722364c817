"""What a failing rank leaves for the launcher: small files in the scratch folder of its group.

Torch-free, since the launcher reads them: see ``blame``.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from ddp_runner.errors import UserError
from ddp_runner.job import Failure

READY = "ready"  # a file of the scratch folder: the training loop has begun
STOP = "stop"  # another: finish the step, save and end

SAVING = "saving"
SAVING_FACTOR = 10  # while it is there, an end waits so many times launch.shutdown_timeout_s
SAVING_POLL_S = 0.05  # between two looks
FRESH_S = 4.0  # a mark that nobody has renewed for so long is of a rank that stands still

# What gloo, NCCL and the store of a group say when another rank is gone or late.
PEER_SIGNS = ("gloo", "NCCL", "Connection", "store", "pair closure")


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


@contextmanager
def marked(scratch: Path | None) -> Iterator[None]:
    """Keep the mark in the scratch folder, if there is one, while this lasts."""
    if scratch is None:
        yield
        return
    scratch.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files was here
    (scratch / SAVING).touch()
    try:
        yield
    finally:
        (scratch / SAVING).unlink(missing_ok=True)


def renewed(scratch: Path) -> bool:
    """Renew the mark, as a rank does that has been told to end; return whether it is there."""
    try:
        os.utime(scratch / SAVING)
    except FileNotFoundError:
        return False
    return True


def is_renewed(scratch: Path) -> bool:
    """Return whether the rank that writes a checkpoint is alive and not stopped."""
    try:
        return time.time() - (scratch / SAVING).stat().st_mtime < FRESH_S
    except FileNotFoundError:
        return False
