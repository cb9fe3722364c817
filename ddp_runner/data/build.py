"""Builds the dataset of a resolved config, alike for every task."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_runner.config.identity import leaves
from ddp_runner.config.instantiate import find, make
from ddp_runner.config.schema import Config
from ddp_runner.config.signatures import source_file
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Dataset, Source, TensorSource
from ddp_runner.data.sources.torch_dataset import Deferred, TorchDataset
from ddp_runner.errors import UserError, typed
from ddp_runner.files import file_sha256, locked
from ddp_runner.seeds import seed_all

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
