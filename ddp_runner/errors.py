"""The one exception for what a user can cause, and what its messages are made of."""

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MOST_NAMES = 3  # that a message lists
# What gloo, NCCL and the store of a group report when another rank is gone or late.
PEER_SIGNS = ("gloo", "NCCL", "Connection", "store", "pair closure")


def printable(line: str) -> str:
    """Return a line with its line ends, and what steers a terminal, as their escapes.

    A value in it may come from anybody's file.
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


class UserError(ValueError):
    """A fault of the input, not of the program: printed as one plain line, without a traceback.

    The message is one line, whatever a value in it holds: the rule, the values, the fix, as in
    ``batch.global_size (100) is not divisible by world_size (3); use 99 or 102``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@contextmanager
def os_errors(what: str, *, fix: str = "free space or make the folder writable") -> Iterator[None]:
    """Turn an OSError of the block into a ``UserError``: what failed, the reason, what helps."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} ({error.strerror or error}); {fix}") from error


def os_sentence(error: OSError) -> str:
    """Return the line to print for an error of the system that nobody has foreseen, with a fix."""
    reason = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}{reason}; free some, also in the folder for temporary files (TMPDIR)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}{reason}; raise the limit, as in ulimit -n 4096"
    if isinstance(error, PermissionError):
        return f"{where}{reason}; make it readable, and writable for a run, or give another folder"
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return f"the current folder is gone ({reason}); change to one that exists"
    return f"{where}{reason}; give folders that exist or can be made"


def exit_with(run: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command with this process's arguments; exit with 2 and a line for a mistake in it."""
    try:
        if code := run(sys.argv[1:]):
            sys.exit(code)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit()


def one_line(error: BaseException) -> str:
    """Return an exception's text in one line; the name of its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def typed(error: BaseException) -> str:
    """Return an exception's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def is_lost_peer(error: BaseException) -> bool:
    """Return whether another rank, gone or late, made this one fail in a collective."""
    is_of_torch = type(error).__module__.startswith("torch.distributed")
    has_sign = is_of_torch or any(sign in str(error) for sign in PEER_SIGNS)
    return has_sign and isinstance(error, RuntimeError)


def listed(names: Sequence[str], *, separator: str = ", ") -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return separator.join(names[:MOST_NAMES]) + more


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, in the plural unless the count is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as 2 h 5 min."""
    whole = round(seconds)
    units = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min")]
    parts = [f"{count} {unit}" for count, unit in [*units, (whole % 60, "s")] if count]
    return " ".join(parts[:2]) or "0 s"


def in_yaml(value: Any) -> str:
    """Return a value as a config writes it: null, true and false; other values as Python does."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word that is most like a mistyped word; None if none is near.

    `cutoff` is the least likeness, from 0 (any word will do) to 1.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)
