"""Open a pseudo-terminal and record what is written to it."""

import os
import pty
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def terminal(*, columns: int = 80, lines: int = 24) -> Iterator[tuple[TextIO, list[str]]]:
    """Open a terminal of this size and yield it, with a list of what it is sent.

    The list is complete after the block. The block ends when every process that holds the terminal
    has ended.
    """
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (lines, columns))
    shown: list[str] = []

    def read() -> None:
        with suppress(OSError):  # how Linux reports the end
            while data := os.read(master, 4096):
                shown.append(data.decode(errors="replace"))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield stream, shown
    reader.join()
    os.close(master)
