"""Builds the dataset of a resolved config, alike for every task."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from filelock import FileLock

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config, leaves
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Dataset, Source, TensorSource
from ddp_runner.data.sources.shared import DOWNLOAD_LOCK
from ddp_runner.seeds import seed_all


def build_dataset(config: Config, *, log: Callable[[str], None]) -> Dataset:
    """Return the config's dataset; see ``load_dataset``."""
    source = build_source(config)
    seed_all(config.seed, "dataset")
    return load_dataset(source, data_root=Path(config.data_root), log=log)


def build_source(config: Config) -> Source | TensorSource:
    """Return what opens the config's dataset.

    Its parts, such as train and eval, are each built with the same random numbers. So a function
    that splits samples at random gives both the two sides of one split.

    Raises:
        UserError: it cannot be built.
    """
    with _alone_to_download(config):
        found: Source | TensorSource = make(
            "dataset",
            config.dataset,
            kind=Source | TensorSource,
            allowed=config.allowed_targets,
            before_each=partial(seed_all, config.seed, "dataset"),
        )
    return found


@contextmanager
def _alone_to_download(config: Config) -> Iterator[None]:
    """Let one rank after the other build a dataset that may download files, as torchvision's do."""
    downloads = [key for key, value in leaves(config.dataset) if value is True]
    with ExitStack() as held:
        if any(key.endswith(".download") for key in downloads):
            root = Path(config.data_root)
            # A folder that cannot be written or locked is not locked: a download fails there.
            with suppress(OSError, RuntimeError):
                root.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(root / DOWNLOAD_LOCK))
        yield
