"""Builds the dataset of a config, prepared once per machine and mapped into every rank's memory."""

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
from ddp_runner.files import file_sha256, locked, replace_file, safe_name
from ddp_runner.seeds import seed_all

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


# Keys of a TorchDataset that prepared samples do not follow from: how they are loaded and changed.
NO_FACTS = {
    *("name", "requires", "folder", "eval_fraction", "split_seed", "num_classes", "shuffle"),
    *("prepare", "mean", "std", "augmentation", "channels", "height", "width"),
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "shuffle_buffer"),
}
DOWNLOAD_LOCK = ".download.lock"  # beside the files: machines may share them, but not the cache
DOWNLOAD_TIMEOUT_S = 10  # without an answer; torchvision would wait for ever


def build_dataset(config: Config, *, log: Callable[[str], None]) -> Dataset:
    """Return the config's dataset; see ``load_dataset``."""
    source = build_source(config)
    seed_all(config.seed, "dataset")
    return load_dataset(source, data_root=Path(config.data_root), log=log)


def build_source(config: Config) -> Source | TensorSource:
    """Return what opens the config's dataset.

    Its parts, such as train and eval, are each built with the same random numbers. So a function
    that splits samples at random gives both the two sides of one split. Those of a
    ``TorchDataset`` are built when it needs them.

    Raises:
        UserError: it cannot be built.
    """
    settings = dict(config.dataset)
    kind = find(settings["_target_"], key="dataset._target_", allowed=config.allowed_targets)
    if isinstance(kind, type) and issubclass(kind, TorchDataset):
        for name in ("train", "eval"):
            given = settings.get(name)
            if isinstance(given, Mapping) and "_target_" in given:
                build = partial(_build, config, f"dataset.{name}", given)
                settings[name] = Deferred(given, build)
    found: Source | TensorSource = _build(config, "dataset", settings, kind=Source | TensorSource)
    if not isinstance(found, TorchDataset):
        return found
    facts = {key: one for key, one in config.dataset.items() if key not in NO_FACTS}
    return replace(found, facts={**facts, "code": _code(facts)})


def _build(config: Config, key: str, settings: Mapping[str, Any], **kind: Any) -> Any:
    """Build what a key names; what may download files, as torchvision's, by one rank at a time.

    Samples that are prepared are those of all runs, so they do not follow from this run's seed.
    """
    seed = 0 if config.dataset.get("prepare") is True else config.seed
    seed_each = partial(seed_all, seed, "dataset")
    downloads = any(
        one.rpartition(".")[2] == "download" and value is True for one, value in leaves(settings)
    )
    with _alone_to_download(Path(config.data_root)) if downloads else ExitStack():
        try:
            return make(
                key, settings, allowed=config.allowed_targets, before_each=seed_each, **kind
            )
        except UserError as error:
            cause = error.__cause__
            is_own = str(error).startswith(f"{key} (") and not isinstance(cause, TypeError)
            if not (downloads and is_own and cause):  # else it is of a part of it
                raise
            place = Path(config.data_root, config.dataset.get("folder") or "").absolute()
            raise UserError(
                f"{key} ({settings.get('_target_')}) can be neither read in {place} nor "
                f"downloaded: {typed(cause)}; put whole files there, or remove them and connect to "
                "the network once, or use dataset=digits, which is bundled"
            ) from error


def _code(settings: Mapping[str, Any]) -> list[str]:
    """Return digests of the files whose classes make the samples, and of those beside or below."""
    named = [str(value) for key, value in leaves(settings) if key.endswith("_target_")]
    files = set[Path]()
    for path in filter(None, map(source_file, named)):
        files |= {*path.parent.glob("**/*.py" if path.name == "__init__.py" else "*.py")}
    return [file_sha256(path) for path in sorted(files) if path.is_file()]


@contextmanager
def _alone_to_download(root: Path) -> Iterator[None]:
    """Let one process of all machines that share a folder download into it; the others wait."""
    with ExitStack() as held:
        # A folder that cannot be written or locked, as with another user's lock, is not locked.
        with suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(root / DOWNLOAD_LOCK))
        held.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
        yield
