"""Processes that the ranks of a run have started, and that must end with the run.

On Linux a launcher adopts the children of a rank that has ended, and so can end them. Elsewhere it
leaves them alone.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LIMIT_S = 1.0  # for killed processes to be gone


def adopt_orphans() -> None:
    """Become the parent of each descendant that loses its own parent. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Return the children of this process; none unless on Linux."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def end_adopted(own: Collection[int]) -> None:
    """Kill the children that this process adopted, and then the children of those.

    Args:
        own: the children that it started itself.
    """
    deadline = time.monotonic() + LIMIT_S
    while (adopted := children() - set(own)) and time.monotonic() < deadline:
        for pid in adopted:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_descendants() -> None:
    """Kill all descendants of this process."""
    parents, found = _parents(), {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    for pid in found - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Return the parent of each process of this machine; empty if there is no /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            # PID (NAME) STATE PARENT …, and the name may hold anything.
            _, parent, *_ = path.read_bytes().rpartition(b")")[2].split()
            found[int(path.parent.name)] = int(parent)
    return found
