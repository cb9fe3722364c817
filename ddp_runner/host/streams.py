"""Printing to streams that may be closed, full, or a pipe without a reader.

Text that cannot be written is dropped, and the run continues.
"""

import errno
import io
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

PATIENCE_S = 2.0  # from the start of a wait until a line tells the user
MOST_LETTERS = 24  # of a key in a shortened name
ERASE_LINE = "\r\x1b[2K"  # on a terminal: the next text replaces the line


def line_width(stream: TextIO) -> int:
    """Return the columns for a line on a terminal that can redraw it; 0: the stream cannot.

    mpirun gives a terminal without lines, Emacs a dumb terminal.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return 0
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:  # its window has just been closed
        return 0
    # Some terminals wrap after a full last column.
    return max(0, size.columns - 1) if size.lines > 0 else 0


def shortened(text: str, width: int) -> str:
    """Return the text in at most `width` columns.

    In a job's name, keys lose their groups and last letters first, since values tell jobs apart.
    If that is not enough, an ellipsis replaces the middle.
    """
    for num_letters in range(MOST_LETTERS, 1, -1):
        if len(text) > width:
            text = re.sub(rf"(?<![\w.])[\w.]*?\b(\w{{1,{num_letters}}})\w*=", r"\1=", text)
    if len(text) <= width:
        return text
    end = max(0, width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def wrap_lines(text: str, width: int) -> str:
    """Return the text with lines longer than `width` broken between words; 0: unchanged.

    The rest of a broken line is indented like the text after the line's label.
    """
    lines = []
    for line in text.splitlines():
        if not 0 < width < len(line):
            lines.append(line)
            continue
        label, gap, rest = line.lstrip().partition("  ")
        has_label = gap and " " not in label
        indent = " " * (len(line) - len(rest.lstrip() if has_label else line.lstrip()[2:]))
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def print_line(text: str, *, stream: TextIO | None = None) -> None:
    """Print a line to a stream, by default to stdout; on a terminal it replaces a live line."""
    stream = stream or sys.stdout
    print(f"{ERASE_LINE if line_width(stream) else ''}{text}", file=stream, flush=True)


def keep_streams(
    on_loss: Callable[[str], None] = lambda sentence: None, *, prefix: str = ""
) -> None:
    """Let this process outlive its stdout and stderr; `on_loss` gets a sentence for each loss.

    With a `prefix`, each line begins with it, empty lines are left out, and no line is redrawn.
    """
    for name, number in ("stdout", 1), ("stderr", 2):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would get its number
            send_nowhere(number)
            on_loss(f"{name} was closed: what it would have shown is in logs/ only")
        stream = getattr(sys, name)
        if stream is not None and stream is not getattr(sys, f"__{name}__"):
            continue  # the stream is captured, as by pytest
        if stream is not None:
            with suppress(OSError):  # a library may have printed while it was imported
                stream.flush()
        wrapper = io.TextIOWrapper(
            io.BufferedWriter(_Descriptor(name, number, on_loss, prefix.encode())),
            encoding=stream.encoding if stream else "utf-8",
            errors="backslashreplace",
            line_buffering=True,  # a killed process has still shown what it printed
        )
        setattr(sys, name, wrapper)
        setattr(sys, f"__{name}__", wrapper)


def send_nowhere(number: int) -> None:
    """Redirect an open or closed descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)


class _Descriptor(io.RawIOBase):
    """A file descriptor that is redirected to /dev/null once it cannot be written."""

    def __init__(
        self, name: str, number: int, on_loss: Callable[[str], None], prefix: bytes
    ) -> None:
        self.name, self._number, self._on_loss = f"<{name}>", number, on_loss
        self._prefix = prefix

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return not self._prefix and os.isatty(self._number)

    def write(self, data: Any, /) -> int:
        if not self._prefix:
            return self._write(data)
        lines = [line for line in bytes(data).splitlines() if line.strip()]
        text = b"".join(self._prefix + line + b"\n" for line in lines)
        while text:
            text = text[self._write(text) :]
        return len(data)

    def _write(self, data: Any) -> int:
        while True:
            try:
                return os.write(self._number, data)
            except OSError as error:
                if error.errno == errno.EAGAIN:  # the reader of a non-blocking pipe is slow
                    select.select([], [self._number], [])
                    continue
                send_nowhere(self._number)
                self._on_loss(
                    f"{self.name[1:-1]} is lost ({error.strerror}): what it would have shown is "
                    "in this file only"
                )
                return len(data)
