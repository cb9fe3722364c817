"""Prepares a dataset once per machine and maps it into the memory of every rank.

A cache folder holds ``tensors.pt`` and, written last, ``manifest.json`` with its size and SHA-256.
Hashing a large file takes seconds. So one process at a time verifies it and notes the result in
``verified.json``; the other processes of the machine trust a recent note.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from ddp_runner.config.schema import digest as digest_of
from ddp_runner.data.dataset import (
    KEYS,
    Dataset,
    Source,
    TensorSource,
    validate_dataset,
    validate_tensors,
)
from ddp_runner.errors import UserError, one_line
from ddp_runner.files import file_sha256, replace_file, safe_name

# Raise it when the manifest changes, or when a source builds something else from one fingerprint.
FORMAT_VERSION = 3
TENSORS, MANIFEST, NOTE = "tensors.pt", "manifest.json", "verified.json"
CHECKSUM = "checksum"  # the key of the checksum over the manifest's other fields
TRUST_S = 3600.0  # how long a note counts: a failing disk changes no file times


def load_dataset(
    source: Source | TensorSource, *, data_root: Path, log: Callable[[str], None]
) -> Dataset:
    """Return the dataset of a ``Source`` or a ``TensorSource``, on the CPU.

    Tensors are memory-mapped: a machine's ranks share one copy of their pages. The first rank to
    take the file lock prepares or rebuilds the cache, and logs that. No collective is involved.

    Raises:
        UserError: the source's files or fields are unusable, its tensors cannot be trained on, or
            the cache cannot be written.
    """
    if isinstance(source, Source):
        dataset = source.open(data_root)
        if dataset is not None or not isinstance(source, TensorSource):
            return validate_dataset(source.name, dataset)
    if source.fingerprint(data_root) is None:
        tensors, digest = validate_tensors(source.name, source.build(data_root)), None
    else:
        # Ranks that find an intact cache take no lock, so a read-only cache works as well.
        folder, fingerprint = _identity(source, data_root)
        if _noted(folder) is None or _fault(folder, fingerprint) is not None:
            folder = _prepare(source, data_root, log)
        tensors = torch.load(folder / TENSORS, mmap=True, weights_only=True)
        digest = json.loads((folder / MANIFEST).read_bytes())["digest"]
    dataset = validate_dataset(source.name, source.dataset(tensors))
    return replace(dataset, digest=digest)


def _cache_root() -> Path:
    if root := os.environ.get("DDP_RUNNER_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_runner"


def _identity(source: TensorSource, data_root: Path) -> tuple[Path, Any]:
    """Return the source's cache folder, and its fingerprint as JSON gives it back."""
    text = json.dumps(source.fingerprint(data_root), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return _cache_root() / f"{safe_name(source.name)}-{digest}", json.loads(text)


def _fault(folder: Path, fingerprint: object) -> str | None:
    """Return why the folder does not hold the complete dataset; None: it does.

    Without a recent note it reads the tensors' file in full.
    """
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        expected = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "size": (folder / TENSORS).stat().st_size,
            "sha256": _noted(folder) or file_sha256(folder / TENSORS),
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


def _stamp(path: Path) -> list[int]:
    """Return what changes with a file's content, including ctime, which no program can set back."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _noted(folder: Path) -> str | None:
    """Return the tensors' SHA-256 from a recent note of this machine; None: there is none."""
    # A note may be missing, half-written or of another kind.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        note = json.loads((folder / NOTE).read_bytes())
        is_recent = 0 <= time.time() - note["at"] < TRUST_S
        if is_recent and note["stamp"] == _stamp(folder / TENSORS):
            return str(note["sha256"])
    return None


def _note(folder: Path) -> None:
    """Note that the tensors are as the manifest says."""
    sha256 = json.loads((folder / MANIFEST).read_bytes())["sha256"]
    note = {"stamp": _stamp(folder / TENSORS), "sha256": sha256, "at": time.time()}
    replace_file(folder / NOTE, json.dumps(note))


def _prepare(source: TensorSource, data_root: Path, log: Callable[[str], None]) -> Path:
    """Return the cache folder, verified or built under the lock unless another process just did."""
    root = _cache_root()
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(root / f"{safe_name(source.name)}.lock"))
        except (OSError, RuntimeError) as error:  # RuntimeError: filelock cannot lock files there
            # An intact cache that others own works as well.
            folder, fingerprint = _identity(source, data_root)
            if _fault(folder, fingerprint) is None:
                return folder
            raise _unwritable(root, error) from error
        folder, fingerprint = _identity(source, data_root)
        fault = _fault(folder, fingerprint)
        if fault is None:
            if _noted(folder) is None:
                # In a read-only folder, or on a full disk, each rank verifies.
                with suppress(OSError):
                    _note(folder)
            return folder
        if folder.exists():
            log(f"dataset {source.name}: rebuilding the cache in {folder} ({fault})")
        else:
            log(f"dataset {source.name}: preparing it, once, in {root}")
        tensors = validate_tensors(source.name, source.build(data_root))
        folder, fingerprint = _identity(source, data_root)  # again: build may have downloaded files
        try:
            _write(folder, tensors, fingerprint)
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            raise _unwritable(root, error) from error
    return folder


def _write(folder: Path, tensors: Mapping[str, Tensor], fingerprint: object) -> None:
    folder.mkdir(exist_ok=True)
    part = folder / f"{TENSORS}.part"
    torch.save(tensors, part)
    digest = hashlib.sha256()  # of the samples' shapes and bytes: the same in any version of torch
    for name in KEYS:
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "size": part.stat().st_size,
        "sha256": file_sha256(part),
        "digest": digest.hexdigest(),
    }
    manifest[CHECKSUM] = digest_of(manifest)
    part.replace(folder / TENSORS)  # never in place: other runs have the old file mapped
    (folder / MANIFEST).write_text(json.dumps(manifest))
    _note(folder)


def _unwritable(root: Path, error: Exception) -> UserError:
    reason = one_line(error)
    return UserError(
        f"the dataset cache {root} cannot be written ({reason}); free some space there, or "
        "name another folder in the environment variable DDP_RUNNER_CACHE"
    )
