"""Files: atomic writes, locks, checksums, and safe reading of anybody's files. Torch-free.

A run folder may come from anybody. Reading a pipe in it would block forever, and a few lines of
YAML may expand to gigabytes.
"""

import errno
import fcntl
import hashlib
import html
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

# PyYAML's own parser takes ten times as long as libyaml, which most builds include.
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
MOST_YAML_KIB, MOST_YAML_VALUES = 1024, 20_000  # a run's config has 10 KiB, hundreds of values
MAX_NAME_BYTES = 200  # file systems allow 255
READER_S = 0.1  # a reader, such as the status command, holds a lock for an instant


class FileIn:
    """An attribute of a class with a `path`: the file of this name in that folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: object) -> Path:
        return Path(folder.path, self._name)


def replace_file(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write a file in full beside the old one, then rename it into the old one's place.

    Without `sync`, a kill leaves the old or the new file whole; a power loss may not.
    """
    with replacing(path, sync=sync) as temp:
        temp.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file; rename it to `path` after the block, synced to disk."""
    temp = path.with_name(f".{path.name}.tmp")
    try:
        temp.unlink(missing_ok=True)  # in somebody else's folder it may be a link to another place
        yield temp
        if sync:
            with temp.open("rb") as file:
                os.fsync(file.fileno())
        temp.replace(path)
    except Exception:
        temp.unlink(missing_ok=True)
        raise


@contextmanager
def temp_folder_in(parent: Path, *, prefix: str) -> Iterator[Path]:
    """Yield a new folder and remove it afterwards; also remove those that killed processes left.

    Each name is new: a rank that outlives its launcher cannot write into a later folder.
    """
    for path in parent.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)
    with TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as temp:
        yield Path(temp)


@contextmanager
def locked(path: Path, *, wait_s: float = math.inf) -> Iterator[None]:
    """Hold the lock of a folder or a file for the block; create the file. A kill releases the lock.

    Another holder may be in this process or another; wait for it for `wait_s`.

    Raises:
        TimeoutError: another holder still has the lock.
        OSError: it is a link to a file, which may lead anywhere, or cannot be opened or locked.
    """
    is_folder = path.is_dir() and not path.is_symlink()
    flags = os.O_CLOEXEC | (0 if is_folder else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    descriptor, deadline = os.open(path, flags, 0o644), time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} is locked") from None
            time.sleep(0.02)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still have it open
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds a file's lock; None if that cannot be known here.

    A shared lock on a file opened for reading: two readers do not disturb each other, and a reader
    may lack the right to write.
    """
    try:
        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # None: a file system without locks, or somebody else's file
        return False if isinstance(error, FileNotFoundError | NotADirectoryError) else None
    return False


def is_missing(path: Path) -> bool:
    """Return whether a file or folder certainly does not exist.

    ``Path.exists`` raises where it lacks permission. This returns False there: reading the file
    then says what is wrong.
    """
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def sync_folder(folder: Path) -> None:
    """Flush the file names of a folder to disk: fsync of a file does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading. Raise OSError if it is a pipe, a device or a folder."""
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
    """Return the text of a run's YAML. Raise ValueError if it is too large or has aliases.

    A few aliases that refer to each other can expand to more values than fit into memory.
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
    """Return the value of a YAML file; see ``yaml_text``. PyYAML raises errors of any type."""
    return yaml.load(yaml_text(path), Loader=LOADER)  # a safe loader


def read_or_none(read: Callable[[Path], Any], path: Path) -> Any:
    """Return what `read` returns; None if the file is missing, unreadable or damaged."""
    try:
        return read(path)
    except Exception:  # PyYAML raises errors of any type for odd tags
        return None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; {} if it is anything else, such as the half line that a kill left."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def yaml_dump(value: Any) -> str:
    """Return plain values as YAML, in their order."""
    value = mapped(lambda item: item, value)  # a list that is there twice would become an alias
    text: str = yaml.dump(value, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    return text


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_safe(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON does not have."""
    return mapped(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x, value)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested mappings and lists with `change` applied to each other value in them."""
    if isinstance(tree, Mapping):
        return {key: mapped(change, item) for key, item in tree.items()}
    return (
        [mapped(change, item) for item in tree] if isinstance(tree, list | tuple) else change(tree)
    )


def leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested mappings, lists and tuples with its path: "s['w'][0]"."""
    if not isinstance(state, Mapping | list | tuple):
        yield path, state
        return
    for key, part in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from leaves(part, f"{path}[{key!r}]")


def in_markdown(text: str) -> str:
    """Escape text for Markdown, so that markup, links and pipes are plain characters."""
    return html.escape(re.sub(r"[\\|\[\]`]", r"\\\g<0>", text), quote=False)


def in_csv(value: Any) -> Any:
    """Return a CSV cell. A leading quote stops a spreadsheet from running text as a formula."""
    text = str(value)
    if value is None or isinstance(value, float | int) or text[:1] not in tuple("=+-@\t\r\n"):
        return value
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return value


def safe_name(text: str) -> str:
    """Return text as a folder name: short, without separators or control characters, not ``..``."""
    name = re.sub(r"[/\\\x00-\x1f]", "-", text.replace("'", "").replace('"', ""))
    # The cut may leave the first bytes of a character.
    name = os.fsencode(name)[:MAX_NAME_BYTES].decode(errors="ignore")
    return name if name.strip(". ") else f"_{name}"
