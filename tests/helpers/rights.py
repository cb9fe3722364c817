"""Make file permissions count for root, too, as whom containers run the tests."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = 0x20080522  # of linux/capability.h
SEES_ALL = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Nobody may read the file or folder in the block, nor what lies below it."""
    mode = path.stat().st_mode
    path.chmod(0)
    before = _effective()
    obey_modes()
    try:
        yield
    finally:
        _set_effective(before)
        path.chmod(mode)


def obey_modes() -> None:
    """Give up root's right to read every file, for this thread and all that it starts."""
    if os.getuid() == 0:
        _set_effective(_effective() & ~SEES_ALL)


def _effective() -> int:
    header, data = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capget(header, data)
    return data[0]


def _set_effective(rights: int) -> None:
    header, data = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(header, data)
    data[0] = rights
    libc.capset(header, data)
