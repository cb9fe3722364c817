"""The temporary folder of a launcher and its ranks. A killed launcher's goes with the next start.

A launcher holds a lock on its folder until it ends, which shows whether it lives.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "ddp_runner-"
MARK = "launcher"  # a file in it: a folder of this name alone may hold somebody's work
LAST = -200  # the priority at exit; multiprocessing removes its own folder at -100
MOST_CHARACTERS = 52  # a socket in it adds 50, and a socket's path ends at 103 on macOS


def temp_folder() -> Path:
    """Return this launcher's folder; the first call makes it, and removes abandoned ones."""
    base = Path(tempfile.gettempdir())
    if (base / MARK).is_file():
        return base  # from an earlier call, or the parent's
    if len(str(base)) > MOST_CHARACTERS:
        base = Path("/tmp")
    for mark in base.glob(f"{PREFIX}*/{MARK}"):
        with suppress(OSError):  # its launcher lives, it is another user's, or a link
            os.close(_locked(mark.parent))
            shutil.rmtree(mark.parent)
    made = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=base))
    with suppress(OSError):  # a file system without locks: nobody else can lock it, either
        _locked(made)  # until this process ends
    (made / MARK).touch()
    # Others look for this name, so they never see the folder unlocked.
    folder = made.rename(base / made.name.removeprefix("new-"))
    # Not with atexit: multiprocessing must first remove its own folder, which is in this one.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=LAST)
    tempfile.tempdir = str(folder)  # also for multiprocessing's files
    return folder


def _locked(folder: Path) -> int:
    """Lock a folder of this user; return the descriptor that holds the lock.

    Raises:
        OSError: another process holds it, or it is no folder of this user.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
