"""A user's own ``torch.utils.data.Dataset``, loaded sample by sample while the model trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ddp_runner.data.dataset import Dataset
from ddp_runner.data.loader import Collate, LoaderSplit
from ddp_runner.errors import UserError


@dataclass(frozen=True)
class TorchDataset:
    """Two map-style datasets, such as torchvision's, and how they are loaded.

    Each is anything with ``__len__`` and ``__getitem__``. A sample may be any tree of tensors and
    numbers, or whatever `collate_fn` makes a batch of. Batches are used as they are: neither
    normalised nor augmented.
    """

    name: str
    train: Any
    eval: Any
    num_classes: int | None = None  # None: no accuracy, precision, recall and F1
    collate_fn: Collate | None = None  # None: torch's default_collate
    num_workers: int = 0  # processes of each rank that load; 0: the rank itself
    prefetch_factor: int = 2  # batches that each of them loads ahead
    persistent_workers: bool = True
    pin_memory: bool | None = None  # None: on a GPU
    # More facts for the model's keys to follow, as in model.in_channels=${dataset.channels}.
    channels: int | None = None

    def open(self, data_root: Path) -> Dataset:
        """Return the datasets as splits.

        Raises:
            UserError: a dataset is missing or not map-style, or a key is out of range.
        """
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise UserError(
                f"dataset.num_workers ({self.num_workers}) must be 0 or greater and "
                f"dataset.prefetch_factor ({self.prefetch_factor}) 1 or greater"
            )
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise UserError(
                f"dataset.collate_fn ({self.collate_fn}) cannot be called; write "
                "{_target_: my_package.collate, _partial_: true}"
            )
        return Dataset(
            self.name,
            self._split("train", self.train),
            self._split("eval", self.eval),
            num_classes=self.num_classes,
            mean=None,
        )

    def _split(self, name: str, dataset: Any) -> LoaderSplit:
        if dataset is None or isinstance(dataset, Mapping):
            raise UserError(
                f"dataset.{name} has no _target_; name your Dataset: "
                f"dataset.{name}._target_=my_package.MyDataset"
            )
        is_iterable = isinstance(dataset, IterableDataset)
        if is_iterable or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise UserError(
                f"dataset.{name} is a {type(dataset).__name__}, which lacks __len__ or "
                "__getitem__; give your class both"
            )
        return LoaderSplit(
            name,
            dataset,
            self.collate_fn or default_collate,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory=self.pin_memory,
        )
