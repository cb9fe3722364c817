"""The temporary folder of a launcher and its ranks; the next start removes a killed launcher's.

A launcher holds a lock on its folder until it ends, which shows whether it is alive.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "ddp_runner-"
MARK = "launcher"  # a file in each folder: without it, the folder is somebody's work
EXIT_PRIORITY = -200  # multiprocessing removes its own folder at -100
MOST_CHARACTERS = 52  # a socket's path adds 50, and must not exceed 103 on macOS


def temp_folder() -> Path:
    """Return this launcher's folder; the first call creates it, and removes abandoned folders."""
    base = Path(tempfile.gettempdir())
    if (base / MARK).is_file():
        return base  # from an earlier call, or the parent's
    if len(str(base)) > MOST_CHARACTERS:
        base = Path("/tmp")
    for mark in base.glob(f"{PREFIX}*/{MARK}"):
        if _lock(mark.parent):
            shutil.rmtree(mark.parent, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=base))
    _lock(new)  # without locks in this file system, no other launcher can lock it either
    (new / MARK).touch()
    # Other launchers look for this name, so they never see the folder unlocked.
    folder = new.rename(base / new.name.removeprefix("new-"))
    # Not with atexit: multiprocessing must first remove its own folder, which is in this one.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=EXIT_PRIORITY)
    tempfile.tempdir = str(folder)  # also for multiprocessing's files
    return folder


def _lock(folder: Path) -> bool:
    """Lock a folder of this user until this process ends; return whether that succeeded."""
    with suppress(OSError):  # its launcher is alive, or it is a link or another user's
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False
