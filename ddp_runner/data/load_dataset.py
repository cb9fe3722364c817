"""Builds the dataset of a config: prepared once per machine, memory-mapped by every rank."""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.config.identity import leaves
from ddp_runner.config.instantiate import find, make
from ddp_runner.config.schema import Config
from ddp_runner.config.signatures import source_file
from ddp_runner.data.dataset import (
    KEYS,
    Dataset,
    Source,
    TensorSource,
    validate_dataset,
    validate_tensors,
)
from ddp_runner.data.sources.torch_dataset import Deferred, TorchDataset
from ddp_runner.errors import UserError, one_line, typed
from ddp_runner.files import file_sha256, is_locked, locked, replace_file, safe_name
from ddp_runner.seeds import seed_all

# Raise it when the manifest changes, or when a source builds other tensors from a fingerprint.
FORMAT_VERSION = 4
TENSORS, MANIFEST = "tensors.pt", "manifest.json"


def load_dataset(
    source: Source | TensorSource, *, data_root: Path, log: Callable[[str], None]
) -> Dataset:
    """Return the dataset of a ``Source`` or a ``TensorSource``, on the CPU.

    Tensors are memory-mapped: the ranks of a machine share their pages. The first rank to take the
    file lock prepares or rebuilds the cache, and logs that. No collective is involved.

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
        # An intact cache is read without the lock, so it may be read-only.
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


def _identity(source: TensorSource, data_root: Path) -> tuple[Path, dict[str, Any]]:
    """Return the source's cache folder, and its fingerprint after a pass through JSON."""
    text = json.dumps(source.fingerprint(data_root), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return _cache_root() / f"{safe_name(source.name)}-{digest}", json.loads(text)


def _fault(folder: Path, fingerprint: Mapping[str, Any], *, in_full: bool = False) -> str | None:
    """Return why the folder is not complete, or None; hash its tensors if `in_full`."""
    tensors = folder / TENSORS
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_bytes()))
        expected = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            **({"sha256": file_sha256(tensors)} if in_full else {"stamp": _stamp(tensors)}),
        }
    except (OSError, ValueError, TypeError) as error:  # not prepared yet, or cut short by a kill
        return f"{MANIFEST} or {TENSORS} cannot be read: {one_line(error)}"
    differing = [
        f"{key} is {value}, {MANIFEST} has {manifest.get(key)}"
        for key, value in expected.items()
        if value != manifest.get(key)
    ]
    return ", ".join(differing) or None


def _stamp(path: Path) -> list[int]:
    """Return size, times and inode: no program can reset ctime after it changes the content."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _prepare(source: TensorSource, data_root: Path, log: Callable[[str], None]) -> Path:
    """Return the cache folder, verified or built under the lock."""
    root = _cache_root()
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = root / f"{safe_name(source.name)}.lock"
            if is_locked(lock):
                log(f"dataset {source.name}: another rank or run is preparing it; waiting")
            stack.enter_context(locked(lock))
        except OSError as error:  # another user's folder: an intact cache in it serves
            folder, fingerprint = _identity(source, data_root)
            if _fault(folder, fingerprint, in_full=True) is None:
                return folder
            raise _unwritable(root, error) from error
        folder, fingerprint = _identity(source, data_root)
        if _fault(folder, fingerprint) is None:  # another process has just prepared it
            return folder
        fault = _fault(folder, fingerprint, in_full=True)
        if fault is None:  # it was copied
            if os.access(folder, os.W_OK):  # else each rank verifies it
                _write_manifest(folder, json.loads((folder / MANIFEST).read_bytes()))
            return folder
        if folder.exists():
            log(f"dataset {source.name}: rebuilding the cache in {folder} ({fault})")
        else:
            log(f"dataset {source.name}: preparing it, once, in {root}")
        for _ in range(3):  # a build may download files, or files may be added meanwhile
            tensors = validate_tensors(source.name, source.build(data_root))
            before, (folder, fingerprint) = fingerprint, _identity(source, data_root)
            if fingerprint == before:
                break
        else:
            raise UserError(
                f"the files of dataset={source.name} change again and again", "wait for the last"
            )
        try:
            _write(folder, tensors, fingerprint)
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            raise _unwritable(root, error) from error
    return folder


def _write(folder: Path, tensors: Mapping[str, Tensor], fingerprint: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    part = folder / f"{TENSORS}.part"
    torch.save(tensors, part)
    digest = hashlib.sha256()  # of shapes and bytes: the same in any version of torch
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
    return UserError(
        f"the dataset cache {root} cannot be written ({one_line(error)})",
        "free some space there, "
        "or name another folder in the environment variable DDP_RUNNER_CACHE",
    )


# Keys of a TorchDataset that do not change its prepared samples.
NO_FACTS = {
    *("name", "requires", "folder", "eval_fraction", "split_seed", "num_classes", "shuffle"),
    *("prepare", "mean", "std", "augmentation", "channels", "height", "width"),
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "shuffle_buffer"),
}


def build_dataset(config: Config, *, log: Callable[[str], None]) -> Dataset:
    """Return the config's dataset; see ``load_dataset``."""
    source = build_source(config)
    seed_all(config.seed, "dataset")
    return load_dataset(source, data_root=Path(config.data_root), log=log)


def build_source(config: Config) -> Source | TensorSource:
    """Return the source that the config's dataset names.

    Its parts, such as train and eval, are each built with the same random numbers. So a function
    that splits samples at random gives both the two sides of one split. A ``TorchDataset`` builds
    its parts when it needs them.

    Raises:
        UserError: it cannot be built.
    """
    settings = dict(config.dataset)
    kind = find(settings["_target_"], key="dataset._target_", allowed=config.allowed_targets)
    if isinstance(kind, type) and issubclass(kind, TorchDataset):
        for name in ("train", "eval"):
            keys = settings.get(name)
            if isinstance(keys, Mapping) and "_target_" in keys:
                settings[name] = Deferred(keys, partial(_build, config, f"dataset.{name}", keys))
    source: Source | TensorSource = _build(config, "dataset", settings, kind=Source | TensorSource)
    if not isinstance(source, TorchDataset):
        return source
    facts = {key: value for key, value in config.dataset.items() if key not in NO_FACTS}
    return replace(source, facts={**facts, "code": _code(facts)})


def _build(config: Config, key: str, settings: Mapping[str, Any], **kind: Any) -> Any:
    """Build the object that a key names; if it may download files, in one process at a time."""
    # All runs share prepared samples, so these do not depend on this run's seed.
    seed = 0 if config.dataset.get("prepare") is True else config.seed
    seed_each = partial(seed_all, seed, "dataset")
    downloads = any(
        name.rpartition(".")[2] == "download" and value is True for name, value in leaves(settings)
    )
    with _alone_to_download(Path(config.data_root)) if downloads else ExitStack():
        try:
            return make(
                key, settings, allowed=config.allowed_targets, before_each=seed_each, **kind
            )
        except UserError as error:
            cause = error.__cause__
            is_own = str(error).startswith(f"{key} (") and not isinstance(cause, TypeError)
            if not (downloads and is_own and cause):  # the fault of a part, such as a transform
                raise
            folder = Path(config.data_root, config.dataset.get("folder") or "").absolute()
            raise UserError(
                f"{key} ({settings.get('_target_')}) can be neither read in {folder} nor "
                f"downloaded: {typed(cause)}",
                "put complete files there, or remove them and connect "
                "to the network once, or use dataset=digits, which is bundled",
            ) from error


def _code(settings: Mapping[str, Any]) -> list[str]:
    """Return digests of the source files that make the samples, and of files beside or below."""
    targets = [str(value) for key, value in leaves(settings) if key.endswith("_target_")]
    files = set[Path]()
    for path in filter(None, map(source_file, targets)):
        files |= {*path.parent.glob("**/*.py" if path.name == "__init__.py" else "*.py")}
    return [file_sha256(path) for path in sorted(files) if path.is_file()]


@contextmanager
def _alone_to_download(root: Path) -> Iterator[None]:
    """Let one process at a time, on all machines, download into a shared folder."""
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only folder holds complete files
            root.mkdir(parents=True, exist_ok=True)
            # Beside the files: machines may share them, but not the cache.
            stack.enter_context(locked(root / ".download.lock"))
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(10)  # seconds; torchvision itself would wait for ever
        yield
