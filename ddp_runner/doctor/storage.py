"""The disk of the outputs folder: its kind and space, and whether locks and renames work there.

Torch-free.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_runner.doctor.finding import LIMIT_S, Finding, ok, problem, warning
from ddp_runner.doctor.machine import GIB, gib
from ddp_runner.files import replace_file
from ddp_runner.tracking.run_dir import MIN_FREE_MIB

MOUNTS = Path("/proc/self/mountinfo")
LEAST_FREE = 5 * GIB  # some checkpoints of a small model
GONE_AT_REBOOT = ("tmpfs", "ramfs")
TRIAL = ".doctor-"  # begins the name of the folder for what is tried
HELD = 3  # exit code of LOCK
LOCK = f"""
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit({HELD})
"""


def space(outputs: Path, *, mounts: Path = MOUNTS) -> Iterator[Finding]:
    """Yield the kind of the outputs folder's disk, and what is free on it."""
    place = existing(outputs)
    kind, point = file_system(place, mounts=mounts)
    usage, inodes = shutil.disk_usage(place), os.statvfs(place)
    value = f"{place}: {kind} at {point}, {gib(usage.free)} free"
    if usage.free < MIN_FREE_MIB * 2**20:
        yield problem("outputs", value, f"free some: a run needs {MIN_FREE_MIB} MiB to start")
    elif inodes.f_files > 0 and inodes.f_favail == 0:
        yield problem("outputs", f"{value}, and no inodes", "delete files: no new one fits")
    elif usage.free < LEAST_FREE:
        yield warning("outputs", value, "checkpoints may fill it: free some, or use another disk")
    elif kind in GONE_AT_REBOOT:
        yield warning("outputs", value, "it is in memory and lost at a reboot: use a real disk")
    elif kind == "overlay":
        yield warning(
            "outputs", value, "it is lost with the container: mount a volume for the outputs"
        )
    else:
        yield ok("outputs", value)


def behaviour(outputs: Path) -> Iterator[Finding]:
    """Yield whether the disk renames and locks as runs need it, tried in a folder of its own."""
    with trial_folder(outputs) as folder:
        path = folder / "file"
        started = time.perf_counter()
        for text in ("first", "second"):
            replace_file(path, text)
        took_ms = (time.perf_counter() - started) * 500
        if path.read_text() == "second":
            yield ok("rename", f"replaces a file whole, {took_ms:.1f} ms with fsync")
        else:
            advice = "run.json and checkpoints could be half: use another disk"
            yield problem("rename", "the old content stays", advice)
        yield lock(path)


def lock(path: Path) -> Finding:
    """Return whether a lock that this process holds keeps another process out."""
    advice = "two commands could write in one run folder: mount it with locks (NFS: without nolock)"
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return problem("lock", f"flock fails ({error.strerror})", advice)
        done = subprocess.run(
            [sys.executable, "-c", LOCK, str(path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S / 2,
            check=False,
        )
    if done.returncode == HELD:
        return ok("lock", "keeps other processes of this machine out")
    if done.returncode == 0:
        return problem("lock", "two processes hold it at once", advice)
    return problem("lock", f"another process fails at it: {done.stderr.strip()[-80:]}", advice)


@contextmanager
def trial_folder(outputs: Path) -> Iterator[Path]:
    """Make a folder in the outputs folder, or above it if there is none; remove it afterwards."""
    parent = existing(outputs)
    # mkdtemp's own path has no `..` since Python 3.12.
    folder = parent / Path(tempfile.mkdtemp(prefix=TRIAL, dir=parent)).name
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def existing(path: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def file_system(path: Path, *, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Return the kind of a path's file system and where it is mounted, from /proc."""
    best = ("unknown", "/")
    resolved = path.resolve()
    for line in os.fsdecode(mounts.read_bytes()).split("\n")[:-1] if mounts.exists() else ():
        before, _, after = line.partition(" - ")
        # \040 is a space.
        point = re.sub(r"\\([0-7]{3})", lambda one: chr(int(one[1], 8)), before.split(" ")[4])
        if resolved.is_relative_to(point) and len(point) >= len(best[1]):
            best = (after.split()[0], point)
    return best
