"""The temporary folder of a launcher: all that it and its workers leave, until its end.

A launcher that is killed cannot remove its folder; the next one that starts does. The kernel tells
whether the owner lives: it holds a lock on its folder, and loses it only when it ends. (Programs
that clean up temporary folders, such as systemd-tmpfiles, leave a locked folder alone as well.)
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "ddp_runner-"
OWNER = "owner"  # a file in it: the host, since a lock is known on its own host alone; the process
NOT_YET = "new-"  # in front of the name until the folder is locked
LAST = -200  # among what multiprocessing does at a process's end; it removes its own at -100
# Of the folder around it: 50 more are of a socket in it, and a socket's path ends at 103 on macOS.
MOST_CHARACTERS = 52
SHORT_BASE = Path("/tmp")


def temp_folder() -> Path:
    """Return this launcher's own folder; the first call makes it, and clears abandoned ones."""
    base = Path(tempfile.gettempdir())
    if base.name.startswith(PREFIX) and (base / OWNER).is_file():
        return base  # since an earlier call, or by the launcher that started this process
    if len(str(base)) > MOST_CHARACTERS:
        base = SHORT_BASE
    clear_abandoned(base)
    folder = _made(base)
    # Not by atexit: multiprocessing removes a folder of its own in this one, and must be first.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=LAST)
    tempfile.tempdir = str(folder)  # also for what multiprocessing leaves at an abrupt end
    return folder


def share_temp_folder(folder: Path) -> None:
    """Make the folder of the launcher that started this process its own as well."""
    tempfile.tempdir = str(folder)


def clear_abandoned(base: Path) -> None:
    """Remove the folders under `base` whose launchers, of this user and host, live no more."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or one that another launcher removes just now
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            host = (folder / OWNER).read_text(encoding="utf-8").partition("\n")[0]
            if host != socket.gethostname():
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _made(base: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix=f"{NOT_YET}{PREFIX}", dir=base))
    (made / OWNER).write_text(f"{socket.gethostname()}\nprocess {os.getpid()}\n", encoding="utf-8")
    descriptor = os.open(made, os.O_RDONLY)  # never closed: the lock lasts as long as the process
    with suppress(OSError):  # a file system without locks; nobody else can then lock it, either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Only now does it bear the name that others look for: none of them ever sees it unlocked.
    return made.rename(base / made.name.removeprefix(NOT_YET))
