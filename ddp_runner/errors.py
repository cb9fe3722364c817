"""The exception for a user's mistakes, and helpers that word its messages. Torch-free."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MOST_NAMES = 3  # a message lists at most this many
# Errors of gloo, NCCL and the store contain one of these if another rank is gone or late.
PEER_SIGNS = re.compile(r"gloo|NCCL|\bConnection\b|(?<![a-z])[Ss]tore|pair closure")


def printable(line: str) -> str:
    """Return a line with its control characters escaped: a value may come from anybody's file."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


class UserError(ValueError):
    """A user's mistake, printed as one plain line without a traceback: the rule, then the fix.

    ``batch.global_size (100) is not divisible by world_size (3); use 99 or 102``.

    Args:
        rule: what must hold, with the values that break it.
        fix: how to get there; None if the rule says it, as in "must be true or false".
    """

    def __init__(self, rule: str, fix: str | None = None) -> None:
        super().__init__(printable(rule if fix is None else f"{rule}; {fix}"))


@contextmanager
def os_errors(
    rule: str, *, fix: str | None = "free space or make the folder writable"
) -> Iterator[None]:
    """Turn an OSError of the block into a ``UserError``: what failed, the reason, the fix."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{rule} ({error.strerror or error})", fix) from error


@contextmanager
def any_error(rule: str, fix: str | None = None) -> Iterator[None]:
    """Turn any exception of a block into a ``UserError``: foreign code and data raise any type."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{rule} ({typed(error)})", fix) from error


def os_sentence(error: OSError) -> str:
    """Return the line to print, with a fix, for an OSError that no other code handles."""
    reason = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}{reason}; free some space, also in the temporary folder (TMPDIR)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}{reason}; raise the limit, as in ulimit -n 4096"
    if isinstance(error, PermissionError):
        return f"{where}{reason}; make it readable, and writable for a run, or give another folder"
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return f"the current folder is gone ({reason}); change to one that exists"
    return f"{where}{reason}; give folders that exist or can be made"


def exit_with(run: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command with this process's arguments; a user's mistake exits with 2 and one line."""
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
    """Return an exception's text on one line; the name of its type if the text is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def typed(error: BaseException) -> str:
    """Return an exception's type and text on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def with_causes(error: BaseException) -> list[BaseException]:
    """Return an error and what it was raised from or amid, the latest first."""
    chain = [error]
    # In a debugger some errors of OmegaConf are their own cause.
    while True:
        last = chain[-1]
        cause = last.__context__ if last.__cause__ is None else last.__cause__
        if cause is None or any(cause is link for link in chain):
            return chain
        chain.append(cause)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone or late."""
    from_torch = type(error).__module__.startswith("torch.distributed")
    has_sign = from_torch or PEER_SIGNS.search(str(error)) is not None
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
    total_s = round(seconds)
    units = [(total_s // 86400, "d"), (total_s // 3600 % 24, "h"), (total_s // 60 % 60, "min")]
    parts = [f"{count} {unit}" for count, unit in [*units, (total_s % 60, "s")] if count]
    return " ".join(parts[:2]) or "0 s"


def in_yaml(value: Any) -> str:
    """Return a value as YAML writes it: null, true, false; other values as Python writes them."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the word most similar to a mistyped word; None if no similarity reaches `cutoff`."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)
