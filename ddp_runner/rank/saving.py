"""A mark in the scratch folder while a checkpoint is being written, so that nobody cuts it short.

Rank 0's writer leaves it. ``interrupts`` waits longer while it is there, and ``supervisor`` before
it ends a worker group that has failed: a restart goes on from that checkpoint. Torch-free.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAVING = "saving"
SAVING_FACTOR = 10  # while it is there, an end waits so many times launch.shutdown_timeout_s
SAVING_POLL_S = 0.05  # between two looks
FRESH_S = 4.0  # a mark that nobody has renewed for so long is of a rank that stands still


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
