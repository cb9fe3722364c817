"""Prepares a dataset once a machine and maps it into every rank; ``load_dataset`` is for worker.py.

A cache folder holds ``tensors.pt`` and, written last, ``manifest.json`` with its size and SHA-256.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ddp_runner.data.source import Dataset, Source
from ddp_runner.errors import UserError
from ddp_runner.folders import safe_name

FORMAT_VERSION = 1  # raise it when what a source builds from the same fingerprint changes
TENSORS, MANIFEST = "tensors.pt", "manifest.json"


def load_dataset(source: Source, *, data_root: Path, say: Callable[[str], None]) -> Dataset:
    """The dataset on CPU, memory-mapped: all ranks of a machine share one copy of its pages.

    Every rank calls it, none waits in a collective: the first to take a file lock prepares.

    Args:
        source: what to load.
        data_root: folder of the files that the source reads.
        say: gets one line when the cache is prepared or a damaged one is rebuilt.

    Raises:
        UserError: the source's files or fields are not usable, or the cache cannot be written.
    """
    if source.fingerprint(data_root) is None:
        tensors = source.build(data_root)
    else:
        # Ranks that find a sound cache need no lock, so a read-only cache serves as well.
        folder, fingerprint = _identity(source, data_root)
        if _fault(folder, fingerprint) is not None:
            folder = _prepare(source, data_root, say)
        tensors = torch.load(folder / TENSORS, mmap=True, weights_only=True)
    return source.dataset(tensors)


def _cache_root() -> Path:
    if root := os.environ.get("DDP_RUNNER_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_runner"


def _identity(source: Source, data_root: Path) -> tuple[Path, Any]:
    """The source's cache folder, and its fingerprint as it reads back from JSON."""
    text = json.dumps(source.fingerprint(data_root), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return _cache_root() / f"{safe_name(source.name)}-{digest}", json.loads(text)


def _describe(tensors: Path, fingerprint: object) -> dict[str, object]:
    with tensors.open("rb") as file:
        return {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "size": tensors.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _fault(folder: Path, fingerprint: object) -> str | None:
    """Why the folder does not hold the whole dataset; None if it does."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        expected = _describe(folder / TENSORS, fingerprint)
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except ValueError:
        return f"{MANIFEST} is not JSON"
    if found == expected:
        return None
    if not isinstance(found, dict):
        return f"{MANIFEST} is not a mapping"
    return ", ".join(
        f"{key} is {value}, {MANIFEST} has {found.get(key)}"
        for key, value in expected.items()
        if value != found.get(key)
    )


def _prepare(source: Source, data_root: Path, say: Callable[[str], None]) -> Path:
    """Build the cache under the lock, unless somebody just did; returns its folder."""
    root = _cache_root()
    lock = FileLock(root / f"{safe_name(source.name)}.lock")
    with _cache_writable(root):
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        folder, fingerprint = _identity(source, data_root)
        fault = _fault(folder, fingerprint)
        if fault is None:
            return folder
        if folder.exists():
            say(f"dataset {source.name}: rebuilding the cache in {folder} ({fault})")
        else:
            say(f"dataset {source.name}: preparing it, once, in {root}")
        tensors = source.build(data_root)
        folder, fingerprint = _identity(source, data_root)  # build may have downloaded files
        with _cache_writable(root):
            folder.mkdir(exist_ok=True)
            part = folder / f"{TENSORS}.part"
            torch.save(tensors, part)
            manifest = _describe(part, fingerprint)
            part.replace(folder / TENSORS)  # never in place: other runs have the old file mapped
            (folder / MANIFEST).write_text(json.dumps(manifest))
        return folder
    finally:
        lock.release()


@contextmanager
def _cache_writable(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        reason = " ".join(str(error).split())
        raise UserError(
            f"the dataset cache {root} cannot be written ({reason}); free some space there, or "
            "name another folder in the environment variable DDP_RUNNER_CACHE"
        ) from error
