"""Open a pseudo-terminal and record what is written to it."""

import os
import pty
import re
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def terminal(*, columns: int = 80, lines: int = 24) -> Iterator[tuple[TextIO, list[str]]]:
    """Open a terminal of this size; yield it and the list of the texts that are written to it.

    The list is complete after the block, which ends when no process holds the terminal any more.
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


def without_waiting(lines: list[str]) -> list[str]:
    """Return a run's lines without the one on ranks that waited, which only a busy machine has."""
    return [line for line in lines if not re.match(r"ranks? .* kept .* waiting", line)]
