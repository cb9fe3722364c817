"""Datasets of Hugging Face's library ``datasets``: from files, a saved folder or the hub.

Numbered samples are memory-mapped from Arrow files; with `streaming` they are read on the way.
API: https://huggingface.co/docs/datasets/package_reference/loading_methods
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.data.dataset import Dataset
from ddp_runner.data.loader import Collate
from ddp_runner.data.loading import Loading
from ddp_runner.data.sources.shared import shuffled_split
from ddp_runner.errors import UserError, typed

NEEDS_HF_EXTRA = 'dataset={} needs datasets {} or later; write pip install "ddp-runner[hf]"'
FIRST_VERSION = (5, 2)  # earlier ones unpickle the files of a dataset, which runs any code
FORMATS = (
    "arrow", "csv", "json", "parquet", "text", "imagefolder", "audiofolder", "videofolder",
    "webdataset",
)  # fmt: skip
SAVED = ("dataset_dict.json", "state.json")  # save_to_disk writes one of them
MOST_SHARDS = 64  # of a saved dataset that is streamed; more readers than shards read everything


@dataclass(frozen=True)
class HFDataset:
    """Two splits of a dataset, and how they are loaded; a sample is a row: column -> value."""

    name: str
    path: str  # a folder under data_root, a format such as csv with data_files, or a hub's name
    config_name: str | None = None  # of a dataset that has several
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None  # under data_root, by split
    train_split: str = "train"
    eval_split: str | None = "test"  # None: eval_fraction of the training split
    eval_fraction: float = 0.1
    split_seed: int = 0  # of the data, not of the run
    columns: Sequence[str] | None = None  # None: all
    streaming: bool = False
    format: str | None = "torch"  # of a row's values; None: Python objects
    transform: Callable[[Any], Any] | None = None  # row -> sample
    collate_fn: Collate | None = None  # None: torch's default_collate
    num_classes: int | None = None  # None: no accuracy, precision, recall and F1
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = True
    pin_memory: bool | None = None
    shuffle_buffer: int = 0  # of a training stream
    channels: int | None = None  # for the model's keys to follow

    def open(self, data_root: Path) -> Dataset:
        """Return the splits; files are converted to Arrow in the library's own cache at most once.

        Raises:
            UserError: a key is out of range, or there is no such dataset, split or column.
        """
        loading = Loading.of(self)
        train, evaluation = self._splits(data_root)
        return Dataset(
            self.name,
            loading.split("train", self._rows(train)),
            loading.split("eval", self._rows(evaluation)),
            num_classes=self.num_classes,
            mean=None,
        )

    def _splits(self, data_root: Path) -> tuple[Any, Any]:
        self._prepare(data_root)
        if self.eval_split is not None:
            return self._load(self.train_split, data_root), self._load(self.eval_split, data_root)
        if self.streaming:
            raise UserError(
                "dataset.eval_split=null splits off a part of the training samples, and how many "
                "there are is not known of a stream; name a split in dataset.eval_split"
            )
        whole, place = self._load(self.train_split, data_root), data_root / self.path
        numbers = shuffled_split(
            len(whole), self.eval_fraction, seed=self.split_seed, noun="samples", place=place
        )
        # In memory, since the library would write the numbers beside the samples.
        train, evaluation = (
            whole.select(numbers[key], keep_in_memory=True) for key in ("train", "eval")
        )
        return train, evaluation

    def _prepare(self, data_root: Path) -> None:
        """Validate the library's version and the path, and switch its progress bars off."""
        needed = NEEDS_HF_EXTRA.format(self.name, ".".join(map(str, FIRST_VERSION)))
        try:
            from datasets import __version__, disable_progress_bars
        except ImportError as error:
            raise UserError(needed) from error
        if tuple(map(int, __version__.split(".")[:2])) < FIRST_VERSION:
            raise UserError(f"{needed}; this is {__version__}")
        is_local = self.data_files is None and (data_root / self.path).exists()
        if not is_local and self.path not in FORMATS and "/" not in self.path:
            raise UserError(
                f"dataset.path ({self.path}) is no folder under {data_root.absolute()}, no format "
                f"({', '.join(FORMATS)}) and no name of the hub, as in user/name; write one of them"
            )
        disable_progress_bars()

    def _load(self, split: str, data_root: Path) -> Any:
        """Return a split as the library's Dataset, or as its IterableDataset if streaming."""
        import datasets

        folder = data_root / self.path
        is_local = self.data_files is None and folder.exists()
        try:
            if is_local and any((folder / name).is_file() for name in SAVED):
                return self._saved(datasets.load_from_disk(str(folder)), split)
            return datasets.load_dataset(
                str(folder) if is_local else self.path,
                self.config_name,
                data_files=_under(data_root, self.data_files),
                split=split,
                streaming=self.streaming,
            )
        except UserError:
            raise
        except Exception as error:  # the library raises anything
            is_found = is_local or self.data_files is not None
            hint = "" if is_found else f", and there is no {folder.absolute()}"
            says_nothing = isinstance(error, datasets.exceptions.DatasetGenerationError)
            reason = error.__cause__ if says_nothing and error.__cause__ else error
            raise UserError(
                f"dataset.path={self.path}: the split {split} cannot be loaded ({typed(reason)})"
                f"{hint}; give the path, data_files and splits as they are"
            ) from error

    def _saved(self, saved: Any, split: str) -> Any:
        """Return a split of what save_to_disk wrote: several splits, or one."""
        if isinstance(saved, Mapping):
            if split not in saved:
                raise UserError(
                    f"dataset.path={self.path} has no split {split}, only {', '.join(saved)}; name "
                    "these in dataset.train_split and dataset.eval_split"
                )
            saved = saved[split]
        elif self.eval_split is not None:
            raise UserError(
                f"dataset.path={self.path} holds one split; write dataset.eval_split=null, which "
                "splits off a part of it"
            )
        if self.streaming:
            return saved.to_iterable_dataset(num_shards=min(MOST_SHARDS, len(saved)))
        return saved

    def _rows(self, split: Any) -> Any:
        """Return the split with the chosen columns and format."""
        if self.columns is not None:
            known = split.column_names
            for column in self.columns:
                if known is not None and column not in known:
                    raise UserError(
                        f"dataset.columns: {self.path} has no column {column}, only "
                        f"{', '.join(known)}; name some of these"
                    )
            split = split.select_columns(list(self.columns))
        return split.with_format(self.format)


def _under(folder: Path, files: Any) -> Any:
    """Return names of files below a folder, but for addresses such as hf://."""
    if isinstance(files, Mapping):
        return {split: _under(folder, names) for split, names in files.items()}
    if isinstance(files, str):
        return files if "://" in files else str(folder / files)
    return files if files is None else [_under(folder, name) for name in files]
