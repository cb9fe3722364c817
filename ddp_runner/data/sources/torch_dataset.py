"""A user's own dataset, map-style or iterable, loaded sample by sample while the model trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.data.dataset import Dataset
from ddp_runner.data.loader import Collate
from ddp_runner.data.loading import Loading
from ddp_runner.data.splits import AbsentSplit
from ddp_runner.data.streams import AnySplit


@dataclass(frozen=True)
class TorchDataset:
    """Two datasets, such as torchvision's, or the one that is used, and how they are loaded.

    Each is anything with ``__len__`` and ``__getitem__``, or a stream: a torch ``IterableDataset``,
    or anything with ``__iter__`` alone. A sample may be any tree of tensors and numbers, or
    whatever `collate_fn` makes a batch of. Batches are used as they are: neither normalised nor
    augmented.
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
    shuffle_buffer: int = 0  # of a training stream: samples that are shuffled at a time; 0: none
    # More facts for the model's keys to follow, as in model.in_channels=${dataset.channels}.
    channels: int | None = None

    def open(self, data_root: Path) -> Dataset:
        """Return the datasets as splits.

        Raises:
            UserError: a dataset is of another kind, or a key is out of range.
        """
        loading = Loading.of(self)
        return Dataset(
            self.name,
            self._split("train", loading),
            self._split("eval", loading),
            num_classes=self.num_classes,
            mean=None,
        )

    def _split(self, name: str, loading: Loading) -> AnySplit:
        dataset = getattr(self, name)
        if dataset is None or isinstance(dataset, Mapping):
            return AbsentSplit(
                f"dataset.{name} has no _target_; name your Dataset: "
                f"dataset.{name}={{_target_:my_package.MyDataset}}"
            )
        return loading.split(name, dataset)
