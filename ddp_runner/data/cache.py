"""Prepares a dataset once per machine and maps it into the memory of every rank.

A cache folder holds ``tensors.pt`` and, written last, ``manifest.json`` with its size and SHA-256.
Hashing a large file takes seconds. So one process at a time verifies it and notes the result in
``verified.json``; the other processes of the machine trust a recent note.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from ddp_runner.config.schema import digest as digest_of
from ddp_runner.data.dataset import Dataset, Source
from ddp_runner.data.validate import KEYS, validate_dataset, validate_source, validate_tensors
from ddp_runner.errors import UserError
from ddp_runner.files import replace_file, safe_name

# Raise it when the manifest changes, or when a source builds something else from one fingerprint.
FORMAT_VERSION = 3
TENSORS, MANIFEST, NOTE = "tensors.pt", "manifest.json", "verified.json"
CHECKSUM = "checksum"  # the key of the checksum over the manifest's other fields
TRUST_S = 3600.0  # how long a note counts: a failing disk changes no file times


def load_dataset(source: Source, *, data_root: Path, log: Callable[[str], None]) -> Dataset:
    """Return the dataset on the CPU, memory-mapped: a machine's ranks share one copy of its pages.

    Every rank calls it; the first one to take the file lock prepares the cache. It contains no
    collective.

    Args:
        source: what to load.
        data_root: folder of the files that the source reads.
        log: takes a line when the cache is prepared, or when a damaged cache is rebuilt.

    Raises:
        UserError: the source's files or fields are unusable, its tensors cannot be trained on, or
            the cache cannot be written.
    """
    validate_source(source)
    if source.fingerprint(data_root) is None:
        tensors, digest = _built(source, data_root), None
    else:
        # Ranks that find an intact cache take no lock, so a read-only cache works as well.
        folder, fingerprint = _identity(source, data_root)
        noted = _noted(folder)
        if noted is None or _fault(folder, fingerprint, sha256=noted) is not None:
            folder = _prepare(source, data_root, log)
        tensors = torch.load(folder / TENSORS, mmap=True, weights_only=True)
        digest = json.loads((folder / MANIFEST).read_bytes())["digest"]
    dataset = source.dataset(tensors)
    validate_dataset(source.name, dataset)
    return replace(dataset, digest=digest)


def _built(source: Source, data_root: Path) -> dict[str, Tensor]:
    tensors = source.build(data_root)
    validate_tensors(source.name, tensors)
    return tensors


def _cache_root() -> Path:
    if root := os.environ.get("DDP_RUNNER_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_runner"


def _identity(source: Source, data_root: Path) -> tuple[Path, Any]:
    """Return the source's cache folder, and its fingerprint as JSON gives it back."""
    text = json.dumps(source.fingerprint(data_root), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return _cache_root() / f"{safe_name(source.name)}-{digest}", json.loads(text)


def _fault(folder: Path, fingerprint: object, *, sha256: str | None = None) -> str | None:
    """Return why the folder does not hold the complete dataset; None: it does.

    Args:
        folder: of the cache.
        fingerprint: of the source.
        sha256: of the tensors' file, if known; None: read the file and compute it.
    """
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        size = (folder / TENSORS).stat().st_size
        expected = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "size": size,
            "sha256": sha256 or _sha256(folder / TENSORS),
        }
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{MANIFEST} is not JSON"
    if not isinstance(found, dict):
        return f"{MANIFEST} is not a mapping"
    differing = [
        f"{key} is {value}, {MANIFEST} has {found.get(key)}"
        for key, value in expected.items()
        if value != found.get(key)
    ]
    if not isinstance(found.get("digest"), str):
        differing.append(f"{MANIFEST} has no digest")
    checksum = found.pop(CHECKSUM, None)
    if not differing and checksum != digest_of(found):
        differing.append(f"{MANIFEST} does not match its checksum")
    return ", ".join(differing) or None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> list[int]:
    """Return what changes with a file's content, including ctime, which no program can set back."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _noted(folder: Path) -> str | None:
    """Return the tensors' SHA-256 from a recent note of this machine; None: there is none."""
    try:
        note = json.loads((folder / NOTE).read_bytes())
        is_recent = 0 <= time.time() - note["at"] < TRUST_S
        return (
            str(note["sha256"]) if is_recent and note["stamp"] == _stamp(folder / TENSORS) else None
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # missing, half-written or of another kind


def _note(folder: Path, sha256: str) -> None:
    note = {"stamp": _stamp(folder / TENSORS), "sha256": sha256, "at": time.time()}
    replace_file(folder / NOTE, json.dumps(note))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the samples' shapes and bytes, the same in every version of torch."""
    digest = hashlib.sha256()
    for name in KEYS:
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _prepare(source: Source, data_root: Path, log: Callable[[str], None]) -> Path:
    """Return the cache folder, verified or built under the lock unless another process just did."""
    root = _cache_root()
    lock = FileLock(root / f"{safe_name(source.name)}.lock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, RuntimeError) as error:  # RuntimeError: filelock cannot lock files there
        # An intact cache that others own works as well.
        folder, fingerprint = _identity(source, data_root)
        if _fault(folder, fingerprint) is None:
            return folder
        raise _unwritable(root, error) from error
    try:
        folder, fingerprint = _identity(source, data_root)
        sha256 = _noted(folder)
        fault = _fault(folder, fingerprint, sha256=sha256)
        if fault is None:
            if sha256 is None:
                with suppress(
                    OSError
                ):  # a read-only folder, or a full disk: then each rank verifies
                    _note(folder, json.loads((folder / MANIFEST).read_bytes())["sha256"])
            return folder
        if folder.exists():
            log(f"dataset {source.name}: rebuilding the cache in {folder} ({fault})")
        else:
            log(f"dataset {source.name}: preparing it, once, in {root}")
        tensors = _built(source, data_root)
        folder, fingerprint = _identity(source, data_root)  # again: build may have downloaded files
        with _cache_writable(root):
            folder.mkdir(exist_ok=True)
            part = folder / f"{TENSORS}.part"
            torch.save(tensors, part)
            manifest = {
                "format_version": FORMAT_VERSION,
                "fingerprint": fingerprint,
                "size": part.stat().st_size,
                "sha256": _sha256(part),
                "digest": _digest(tensors),
            }
            manifest[CHECKSUM] = digest_of(manifest)
            part.replace(folder / TENSORS)  # never in place: other runs have the old file mapped
            (folder / MANIFEST).write_text(json.dumps(manifest))
            _note(folder, str(manifest["sha256"]))
        return folder
    finally:
        lock.release()


@contextmanager
def _cache_writable(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise _unwritable(root, error) from error


def _unwritable(root: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(
        f"the dataset cache {root} cannot be written ({reason}); free some space there, or "
        "name another folder in the environment variable DDP_RUNNER_CACHE"
    )
