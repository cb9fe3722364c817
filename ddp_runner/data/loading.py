"""How the samples of a user's datasets are loaded: the keys that their YAMLs have in common."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from ddp_runner.data.loader import Collate, LoaderSplit
from ddp_runner.data.stream import StreamSplit
from ddp_runner.errors import UserError


@dataclass(frozen=True)
class Loading:
    """What makes a split of a dataset."""

    collate_fn: Collate | None = None  # None: torch's default_collate
    transform: Callable[[Any], Any] | None = None  # of a sample, before collate_fn
    num_workers: int = 0  # processes of each rank that load; 0: the rank itself
    prefetch_factor: int = 2  # batches that each of them loads ahead
    persistent_workers: bool = True  # not those of a stream: they end with its epoch
    pin_memory: bool | None = None  # None: on a GPU
    shuffle_buffer: int = 0  # samples of a training stream that are shuffled at a time; 0: none

    def __post_init__(self) -> None:
        """Reject keys out of range.

        Raises:
            UserError: a number is too small, or what should be a function is none.
        """
        least = {"num_workers": 0, "prefetch_factor": 1, "shuffle_buffer": 0}
        for key, smallest in least.items():
            if getattr(self, key) < smallest:
                raise UserError(
                    f"dataset.{key} ({getattr(self, key)}) must be {smallest} or greater"
                )
        for key in ("collate_fn", "transform"):
            if (given := getattr(self, key)) is not None and not callable(given):
                raise UserError(
                    f"dataset.{key} ({given}) cannot be called; write "
                    f"{{_target_: my_package.{key}, _partial_: true}}"
                )

    @classmethod
    def of(cls, source: Any) -> "Loading":
        """Return the keys that a source has as fields, and the defaults of the others.

        Raises:
            UserError: a key is out of range.
        """
        names = [one.name for one in fields(cls) if hasattr(source, one.name)]
        keys = {name: getattr(source, name) for name in names}
        if keys["num_workers"] is None:  # the ranks of a machine have shared its cores among them
            keys["num_workers"] = torch.get_num_threads()
        return cls(**keys)

    def split(self, name: str, dataset: Any) -> LoaderSplit | StreamSplit:
        """Return a dataset's samples as a split: of a stream, or of numbered samples.

        Raises:
            UserError: the dataset is of neither kind, or of a kind that a key does not fit.
        """
        has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not has_numbers:
            if not isinstance(dataset, Iterable):
                raise UserError(
                    f"dataset.{name} is a {type(dataset).__name__}, which lacks __len__ or "
                    "__getitem__; give your class both, or __iter__ for a stream"
                )
            return StreamSplit(
                name,
                dataset,
                self.collate_fn or default_collate,
                transform=self.transform,
                shuffle_buffer=self.shuffle_buffer if name == "train" else 0,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor,
                pin_memory=self.pin_memory,
            )
        if self.shuffle_buffer and name == "train":
            raise UserError(
                f"dataset.shuffle_buffer ({self.shuffle_buffer}) is for streams; dataset.{name} is "
                f"a {type(dataset).__name__} with __len__, whose samples come in another order in "
                "each epoch anyway; leave it out"
            )
        return LoaderSplit(
            name,
            dataset if self.transform is None else Transformed(dataset, self.transform),
            self.collate_fn or default_collate,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory=self.pin_memory,
        )


@dataclass(frozen=True)
class Transformed:
    """Numbered samples that a function changes; many at once are fetched at once."""

    samples: Any
    transform: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.samples[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return several samples."""
        if hasattr(self.samples, "__getitems__"):
            return [self.transform(sample) for sample in self.samples.__getitems__(indices)]
        return [self[index] for index in indices]
