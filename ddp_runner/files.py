"""Files: their names in a folder, checksums, writing them whole, and reading anybody's. Torch-free.

A run folder may come from anybody. A pipe in it would wait for ever, and a few lines of YAML may
stand for gigabytes.
"""

import errno
import fcntl
import hashlib
import html
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

# PyYAML's own parser takes ten times as long as libyaml, which most builds of it carry.
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
MOST_YAML_KIB, MOST_YAML_VALUES = 1024, 20_000  # of a run's config, which has ten, and hundreds
MAX_NAME_BYTES = 200  # file systems allow 255
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # a link could lead out of a run folder
LOCK_POLL_S = 0.02
READER_S = 0.1  # a reader, such as the status command, holds a lock for an instant


class FileIn:
    """An attribute of a class with a `path`: the path of the file of this name in that folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: object) -> Path:
        return Path(folder.path, self._name)


def replace_file(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write a file in full beside the old one, then rename it into the old one's place.

    Without `sync` a kill leaves one of the two whole, but not a loss of power.
    """
    with replacing(path, sync=sync) as temp:
        temp.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Give the path of a new file; rename it to `path` after the block, once it is on the disk."""
    temp = path.with_name(f".{path.name}.tmp")
    try:
        temp.unlink(missing_ok=True)  # in somebody else's folder it may be a link that leads out
        yield temp
        if sync:
            with temp.open("rb") as file:
                os.fsync(file.fileno())
        temp.replace(path)
    except Exception:
        with suppress(OSError):
            temp.unlink()
        raise


@contextmanager
def temp_folder_in(parent: Path, *, prefix: str) -> Iterator[Path]:
    """Give a new folder, and remove it afterwards with those that killed processes have left.

    Its name is new, so that a rank that lives longer than its launcher writes into none of these.
    """
    for path in parent.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as temp:
        yield Path(temp)


@contextmanager
def locked(path: Path, *, wait_s: float = math.inf) -> Iterator[None]:
    """Hold the lock of a file, which is made if need be, for the block; a killed process lets go.

    Args:
        path: of the file.
        wait_s: how long to wait for another holder, of this process or another.

    Raises:
        TimeoutError: another still holds it.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NOFOLLOW
    descriptor, deadline = os.open(path, flags, 0o644), time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} is locked") from None
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still have it open
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None: nobody can tell here.

    The lock is tried shared and in a file that is only read: two readers do not disturb each other,
    and a reader may lack the right to write.
    """
    try:
        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None  # a file system without locks, or somebody else's file
    return False


def is_missing(path: Path) -> bool:
    """Return whether there is certainly no such file or folder.

    ``Path.exists`` raises an error where it may not look. Here such a file is not missing, and
    reading it says what is wrong.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: fsync of a file does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> BufferedReader:
    """Open a file to read it; an OSError if it is a pipe, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_file(path: Path) -> bytes:
    """Return the content of a file; see ``open_file``."""
    with open_file(path) as file:
        return file.read()


def yaml_text(path: Path) -> str:
    """Return the text of a YAML that a run has written; a ValueError if no run writes such a one.

    A few aliases that name each other stand for more values than any memory holds.
    """
    with open_file(path) as file:
        text = file.read(1024 * MOST_YAML_KIB + 1).decode()
    if len(text) > 1024 * MOST_YAML_KIB:
        raise ValueError(f"it has more than {MOST_YAML_KIB} KiB")
    if "*" in text or len(text) > MOST_YAML_VALUES:
        for number, event in enumerate(yaml.parse(text, LOADER)):
            if number > MOST_YAML_VALUES or type(event) is yaml.AliasEvent:
                raise ValueError(f"it has aliases, or more than {MOST_YAML_VALUES} values")
    return text


def read_yaml(path: Path) -> Any:
    """Return what a YAML holds; see ``yaml_text``. PyYAML raises errors of any type."""
    return yaml.load(yaml_text(path), Loader=LOADER)  # a safe loader


def yaml_dump(value: Any, **options: Any) -> str:
    """Return plain values as YAML, in their order; for the options see ``yaml.dump``."""
    text: str = yaml.dump(value, Dumper=DUMPER, sort_keys=False, allow_unicode=True, **options)
    return text


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_safe(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def leaves(state: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what a state's mappings, lists and tuples hold, each with its place: "s['w'][0]"."""
    if not isinstance(state, Mapping | list | tuple):
        yield place, state
        return
    for key, part in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from leaves(part, f"{place}[{key!r}]")


def in_markdown(text: str) -> str:
    """Return anybody's text for Markdown: its markup, links and pipes are plain characters."""
    return html.escape(re.sub(r"[\\|\[\]`]", r"\\\g<0>", text), quote=False)


def in_csv(value: Any) -> Any:
    """Return a cell; a quote keeps a spreadsheet from computing a text that is not a number."""
    text = str(value)
    if value is None or isinstance(value, float | int) or text[:1] not in tuple("=+-@\t\r\n"):
        return value
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return value


def safe_name(text: str) -> str:
    """Return the text as the name of a folder: not too long, and never that of the folder above.

    It has no separators and no control characters.
    """
    name = re.sub(r"[/\\\x00-\x1f]", "-", text.replace("'", "").replace('"', ""))
    # The cut may leave the first bytes of a character.
    name = os.fsencode(name)[:MAX_NAME_BYTES].decode(errors="ignore")
    return name if name.strip(". ") else f"_{name}"
