"""Prepares a dataset once per machine and maps it into the memory of every rank.

A cache folder holds ``tensors.pt`` and, written last, ``manifest.json`` with its SHA-256 and its
stamp: size, times and inode. Hashing a large file takes seconds, so a file with this stamp is
trusted. With another, as after a copy, one process verifies the hash and writes the new stamp.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.dataset import (
    KEYS,
    Dataset,
    Source,
    TensorSource,
    validate_dataset,
    validate_tensors,
)
from ddp_runner.errors import UserError, one_line
from ddp_runner.files import file_sha256, locked, replace_file, safe_name

# Raise it when the manifest changes, or when a source builds something else from one fingerprint.
FORMAT_VERSION = 4
TENSORS, MANIFEST = "tensors.pt", "manifest.json"


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
        if _fault(folder, fingerprint) is not None:
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


def _fault(folder: Path, fingerprint: object, *, in_full: bool = False) -> str | None:
    """Return why the folder does not hold the complete dataset; None: it does.

    Args:
        folder: of the cache.
        fingerprint: of the source.
        in_full: read and hash the tensors' file; else compare its stamp.
    """
    tensors = folder / TENSORS
    try:
        found = dict(json.loads((folder / MANIFEST).read_bytes()))
        expected = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            **({"sha256": file_sha256(tensors)} if in_full else {"stamp": _stamp(tensors)}),
        }
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, TypeError):
        return f"{MANIFEST} is damaged"
    differing = [
        f"{key} is {value}, {MANIFEST} has {found.get(key)}"
        for key, value in expected.items()
        if value != found.get(key)
    ]
    return ", ".join(differing) or None


def _stamp(path: Path) -> list[int]:
    """Return what changes with a file's content, including ctime, which no program can set back."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _prepare(source: TensorSource, data_root: Path, log: Callable[[str], None]) -> Path:
    """Return the cache folder, verified or built under the lock unless another process just did."""
    root = _cache_root()
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = root / f"{safe_name(source.name)}.lock"
            try:
                stack.enter_context(locked(lock, wait_s=0.0))
            except TimeoutError:
                log(f"dataset {source.name}: another rank or run is preparing it; waiting")
                stack.enter_context(locked(lock))
        except OSError as error:
            # An intact cache that others own works as well.
            folder, fingerprint = _identity(source, data_root)
            if _fault(folder, fingerprint, in_full=True) is None:
                return folder
            raise _unwritable(root, error) from error
        folder, fingerprint = _identity(source, data_root)
        if _fault(folder, fingerprint) is None:
            return folder
        fault = _fault(folder, fingerprint, in_full=True)
        if fault is None:
            with suppress(OSError):  # in a read-only folder, or on a full disk, each rank verifies
                _write_manifest(folder, json.loads((folder / MANIFEST).read_bytes()))
            return folder
        if folder.exists():
            log(f"dataset {source.name}: rebuilding the cache in {folder} ({fault})")
        else:
            log(f"dataset {source.name}: preparing it, once, in {root}")
        for _ in range(3):  # files may be downloaded, or added, while they are read
            tensors = validate_tensors(source.name, source.build(data_root))
            before, (folder, fingerprint) = fingerprint, _identity(source, data_root)
            if fingerprint == before:
                break
        else:
            raise UserError(f"the files of dataset={source.name} change again and again; wait")
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
        "sha256": file_sha256(part),
        "digest": digest.hexdigest(),
    }
    part.replace(folder / TENSORS)  # never in place: other runs have the old file mapped
    _write_manifest(folder, manifest)


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    stamp = _stamp(folder / TENSORS)
    replace_file(folder / MANIFEST, json.dumps({**manifest, "stamp": stamp}))


def _unwritable(root: Path, error: Exception) -> UserError:
    reason = one_line(error)
    return UserError(
        f"the dataset cache {root} cannot be written ({reason}); free some space there, or "
        "name another folder in the environment variable DDP_RUNNER_CACHE"
    )
