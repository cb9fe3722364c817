"""A terminal to write to; a helper of the tests, not a test."""

import os
import pty
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def terminal(*, columns: int = 80, lines: int = 24) -> Iterator[tuple[TextIO, list[str]]]:
    """Open a terminal of this size, and yield it with what it is shown.

    The list is complete after the block, which also ends once every process that holds the
    terminal has.
    """
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (lines, columns))
    shown: list[str] = []

    def read() -> None:
        with suppress(OSError):  # Linux's word for the end
            while data := os.read(master, 4096):
                shown.append(data.decode(errors="replace"))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield stream, shown
    reader.join()
    os.close(master)
