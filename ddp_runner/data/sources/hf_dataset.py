"""Datasets of Hugging Face's library ``datasets``: from files, a saved folder or the hub.

Numbered rows are memory-mapped from Arrow files; with `streaming` they are read as a stream.
API: https://huggingface.co/docs/datasets/package_reference/loading_methods
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.data.sources.torch_dataset import TorchDataset
from ddp_runner.errors import UserError, typed
from ddp_runner.files import mapped

FIRST_VERSION = (5, 2)  # earlier versions unpickle a dataset's files, which may run any code
FORMATS = (
    "arrow", "csv", "json", "parquet", "text", "imagefolder", "audiofolder", "videofolder",
    "webdataset",
)  # fmt: skip
SAVED = ("dataset_dict.json", "state.json")  # files that save_to_disk writes
MOST_SHARDS = 64  # of a streamed saved dataset; with more readers, each reads everything


@dataclass(frozen=True)
class HFDataset(TorchDataset):
    """Two splits of a dataset of the library; a sample is a row: column -> value."""

    train: Any = None  # built from the keys below
    eval_fraction: float | None = 0.1  # of the training split, without an eval_split
    path: str = ""  # a folder under data_root, a format such as csv, or a name on the hub
    config_name: str | None = None  # configuration of a dataset that has several
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None  # under data_root, by split
    train_split: str = "train"
    eval_split: str | None = "test"  # None: eval_fraction of the training split
    columns: Sequence[str] | None = None  # None: all
    streaming: bool = False
    format: str | None = "torch"  # type of a row's values; None: Python objects

    def _both(self, data_root: Path) -> tuple[Any, Any]:
        if self.streaming and self.eval_split is None:
            raise UserError(
                "dataset.eval_split=null splits off a part of the training samples, and the length "
                "of a stream is unknown",
                "name a split in dataset.eval_split",
            )
        train = self._load(self.train_split, data_root)
        return train, self.eval_split and self._load(self.eval_split, data_root)

    def _load(self, split: str, data_root: Path) -> Any:
        """Return a split as the library's Dataset, or as its IterableDataset if streaming."""
        datasets, path, folder = _library(), self.path, data_root / self.path

        def under_root(file: str | None) -> str | None:  # addresses such as hf:// stay
            return file if file is None or "://" in file else str(data_root / file)

        is_local = self.data_files is None and folder.exists()
        if not (is_local or path in FORMATS or "/" in path):
            raise UserError(
                f"dataset.path ({path}) is neither a folder under {data_root.absolute()} nor a "
                f"format ({', '.join(FORMATS)})",
                "give one, or a name on the hub such as user/name",
            )
        try:
            if is_local and any((folder / name).is_file() for name in SAVED):
                rows = _saved(datasets.load_from_disk(str(folder)), split, path=path)
                if self.streaming:
                    rows = rows.to_iterable_dataset(num_shards=min(MOST_SHARDS, len(rows)))
            else:
                rows = datasets.load_dataset(
                    str(folder) if is_local else path,
                    self.config_name,
                    data_files=mapped(under_root, self.data_files),
                    split=split,
                    streaming=self.streaming,
                )
        except Exception as error:  # the library raises any kind
            if isinstance(error, UserError):
                raise
            hint = "" if is_local or self.data_files else f", and there is no {folder.absolute()}"
            is_wrapper = isinstance(error, datasets.exceptions.DatasetGenerationError)
            reason = error.__cause__ if is_wrapper and error.__cause__ else error
            raise UserError(
                f"dataset.path={path}: the split {split} cannot be loaded ({typed(reason)}){hint}",
                "correct the path, data_files or the split",
            ) from error
        columns, existing = self.columns, rows.column_names
        if missing := set(columns or ()) - set(existing or columns or ()):
            raise UserError(
                f"dataset.columns: {path} has no column {', '.join(sorted(missing))}, only "
                f"{', '.join(existing)}",
                "choose from these",
            )
        rows = rows if columns is None else rows.select_columns(list(columns))
        return rows.with_format(self.format)


def _library() -> Any:
    import datasets

    if tuple(map(int, datasets.__version__.split(".")[:2])) < FIRST_VERSION:
        raise UserError(
            f"dataset=hf_dataset needs datasets {'.'.join(map(str, FIRST_VERSION))} or later, not "
            f"{datasets.__version__}",
            'write pip install "ddp-runner[hf]"',
        )
    datasets.disable_progress_bars()
    return datasets


def _saved(saved: Any, split: str, *, path: str) -> Any:
    """Return a split of a saved dataset: several splits, or an unnamed split."""
    if isinstance(saved, Mapping):
        if split not in saved:
            raise UserError(
                f"dataset.path={path} has no split {split}, only {', '.join(saved)}",
                "write them in dataset.train_split and dataset.eval_split",
            )
        return saved[split]
    if split != (only := str(saved.split or "train")):
        raise UserError(
            f"dataset.path={path} holds one split",
            "write dataset.eval_split=null, which splits off "
            f"a part of it, and dataset.train_split={only}",
        )
    return saved
