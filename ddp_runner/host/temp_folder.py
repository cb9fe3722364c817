"""The temporary folder of a launcher and its ranks, removed when the launcher ends.

A killed launcher cannot remove its folder, so the next one does. The owner holds a lock on its
folder until it ends, so the lock shows whether it lives. (Programs that clean up temporary files,
such as systemd-tmpfiles, leave a locked folder alone, too.)
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
OWNER = "owner"  # a file with host and process; a lock is visible on its own host only
UNLOCKED = "new-"  # starts the name until the folder is locked
LAST = -200  # the priority at exit; multiprocessing removes its own folder at -100
# In the path around it: a socket in it adds 50, and a socket's path ends at 103 on macOS.
MOST_CHARACTERS = 52
SHORT_BASE = Path("/tmp")


def temp_folder() -> Path:
    """Return this launcher's folder; the first call creates it, and clears abandoned ones."""
    base = Path(tempfile.gettempdir())
    if base.name.startswith(PREFIX) and (base / OWNER).is_file():
        return base  # from an earlier call, or shared by the parent
    if len(str(base)) > MOST_CHARACTERS:
        base = SHORT_BASE
    clear_abandoned(base)
    folder = _made(base)
    # Not with atexit: multiprocessing must first remove its own folder, which is in this one.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=LAST)
    share_temp_folder(folder)
    return folder


def share_temp_folder(folder: Path) -> None:
    """Use a launcher's folder for all temporary files of this process."""
    # Set globally, so that a killed process leaves multiprocessing's files in this folder, too.
    tempfile.tempdir = str(folder)


def clear_abandoned(base: Path) -> None:
    """Remove the folders in `base` whose launchers, of this user and host, have ended."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another launcher is removing it
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
    """Return a new folder, which stays locked until the process ends."""
    made = Path(tempfile.mkdtemp(prefix=f"{UNLOCKED}{PREFIX}", dir=base))
    (made / OWNER).write_text(f"{socket.gethostname()}\nprocess {os.getpid()}\n", encoding="utf-8")
    descriptor = os.open(made, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: nobody else can lock it, either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Others look for this name, so they never see the folder unlocked.
    return made.rename(base / made.name.removeprefix(UNLOCKED))
