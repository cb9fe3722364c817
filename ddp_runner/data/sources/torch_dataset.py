"""A dataset that a config names, map-style or iterable: torchvision's, or one of your own.

It is loaded sample by sample while the model trains, or prepared once: then its samples are two
tensors in the cache, and torchvision, whose import takes seconds, is not imported again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from ddp_runner.data.dataset import Augmentation, Dataset
from ddp_runner.data.loader import Collate, LoaderSplit
from ddp_runner.data.loading import Loading
from ddp_runner.data.sources.shared import (
    files_digest,
    image_dataset,
    require_at_least,
    require_eval_fraction,
    shuffled_split,
    with_facts,
)
from ddp_runner.data.splits import AbsentSplit, Piece
from ddp_runner.data.streams import AnySplit
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import memory_bytes
from ddp_runner.seeds import generator_states, moved

PREPARED_AT_ONCE = 256  # samples
FALSE = "write dataset.prepare=false"


@dataclass(frozen=True)
class Deferred:
    """A dataset of the config that is built when it is needed."""

    facts: Mapping[str, object]  # what its samples follow from: its keys, the source of its class
    build: Callable[[], Any]


@dataclass(frozen=True)
class TorchDataset:
    """Two datasets, such as torchvision's, or the one that is used, and how they are loaded.

    Each is anything with ``__len__`` and ``__getitem__``, or a stream: a torch ``IterableDataset``,
    or anything with ``__iter__`` alone. A sample may be any tree of tensors and numbers, or
    whatever `collate_fn` makes a batch of. Prepared samples are pairs of tensors or numbers.
    """

    name: str
    train: Any
    eval: Any = None
    eval_fraction: float | None = None  # of train, if there is no eval
    split_seed: int = 0  # of the data, not of the run
    folder: str | None = None  # under data_root, of the files that the samples come from
    prepare: bool = False
    num_classes: int | None = None  # None: no accuracy, precision, recall and F1
    # Of pixels (uint8) scaled to 0..1, or one per channel; None: batches are used as they are.
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] = 1.0
    augmentation: Augmentation | None = None  # of normalised pictures
    collate_fn: Collate | None = None  # None: torch's default_collate
    num_workers: int | None = 0  # processes of each rank that load; None: as many as it has threads
    prefetch_factor: int = 2  # batches that each of them loads ahead
    persistent_workers: bool = True
    pin_memory: bool | None = None  # None: on a GPU
    shuffle_buffer: int = 0  # of a training stream: samples that are shuffled at a time; 0: none
    # Facts for other keys to follow, as in model.in_channels=${dataset.channels}.
    channels: int | None = None
    height: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        given = [key for key in ("channels", "height", "width") if getattr(self, key) is not None]
        require_at_least(self, **dict.fromkeys(given, 1))
        for key in ("mean", "std"):
            value = getattr(self, key)
            if isinstance(value, Sequence) and len(value) != (self.channels or len(value)):
                raise UserError(
                    f"dataset.{key} ({list(value)}) must be one number, or one for each of "
                    f"dataset.channels ({self.channels})"
                )
        if self.augmentation is not None and self.mean is None:
            raise UserError(
                "dataset.augmentation changes normalised pictures, and dataset.mean is null; write "
                "dataset.mean=0 dataset.std=1, or leave the augmentation to the transforms"
            )
        if self.prepare and self.folder is None:
            raise UserError(
                "dataset.prepare=true prepares anew what has changed, and so needs dataset.folder; "
                "name the folder under data_root of the files that the samples come from"
            )
        if self.eval_fraction is not None:
            require_eval_fraction(self.eval_fraction)
            if self.eval is not None:
                raise UserError(
                    f"dataset.eval_fraction ({self.eval_fraction}) splits off a part of "
                    "dataset.train, and there is a dataset.eval; write dataset.eval=null, or leave "
                    "the fraction out"
                )

    def open(self, data_root: Path) -> Dataset | None:
        """Return the datasets as splits; None: they are to be prepared.

        Raises:
            UserError: a dataset is of another kind, or a key is out of range.
        """
        if self.prepare:
            return None
        found = with_facts(self, *self._splits().values())
        if self.folder is None:
            return found
        return replace(found, digest=f"files:{files_digest(data_root / self.folder)}")

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the keys of the two, their source, and the files with their times."""
        given = [getattr(one, "facts", None) for one in (self.train, self.eval)]
        files = files_digest(data_root / str(self.folder), with_times=True)
        split = [self.eval_fraction, self.split_seed, self.num_classes]
        return {"given": given, "split": split, "files": files}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Load all samples once.

        Raises:
            UserError: they are no pairs of tensors of one shape, are drawn at random, do not fit in
                memory, or one cannot be loaded.
        """
        tensors = {}
        for name, split in self._splits().items():
            if isinstance(split, AbsentSplit):
                split.load()
            if not isinstance(split, LoaderSplit):
                raise UserError(f"dataset.{name} has no numbered samples to prepare; {FALSE}")
            tensors[f"{name}_inputs"], tensors[f"{name}_targets"] = _prepared(split)
        return tensors

    dataset = image_dataset  # of prepared samples, which stay memory-mapped

    def sample_names(self, data_root: Path) -> dict[str, list[str]]:
        """Return the files of each split, if they are an ImageFolder's, by their paths below it."""
        names = {}
        for name, dataset in self._built().items():
            part = dataset.indices if isinstance(dataset, Subset) else None
            whole = dataset if part is None else dataset.dataset
            if (files := getattr(whole, "samples", None)) and hasattr(whole, "root"):
                numbers = range(len(files)) if part is None else part
                base = data_root / self.folder if self.folder else whole.root
                names[name] = [os.path.relpath(files[number][0], base) for number in numbers]
        return names

    def _splits(self) -> dict[str, AnySplit]:
        loading, found = Loading.of(self), dict[str, AnySplit]()
        for name, dataset in self._built().items():
            if dataset is None or isinstance(dataset, Mapping):
                found[name] = AbsentSplit(
                    f"dataset.{name} has no _target_; name your Dataset: "
                    f"dataset.{name}={{_target_:my_package.MyDataset}}"
                )
            else:
                found[name] = loading.split(name, dataset)
        return found

    def _built(self) -> dict[str, Any]:
        """Return what train and eval name.

        Raises:
            UserError: one cannot be built or split, or their classes are not num_classes.
        """
        both = {"train": self.train, "eval": self.eval}
        for name, dataset in both.items():
            if isinstance(dataset, Deferred):
                both[name] = dataset.build()
        # An ImageFolder numbers its classes by their names, so a missing one moves the others.
        classes = {name: set(getattr(one, "class_to_idx", ())) for name, one in both.items()}
        for name, found in classes.items():
            if found and self.num_classes not in (None, len(found)):
                raise UserError(
                    f"dataset.{name} has {len(found)} classes, and dataset.num_classes is "
                    f"{self.num_classes}; write dataset.num_classes={len(found)}"
                )
        if all(classes.values()) and (only := classes["train"] ^ classes["eval"]):
            raise UserError(
                f"the classes of dataset.train and dataset.eval differ: {', '.join(sorted(only))} "
                "is in only one of them; give both the same classes"
            )
        train = both["train"]
        if self.eval_fraction is None:
            return both
        if isinstance(train, IterableDataset) or not hasattr(train, "__len__"):
            raise UserError(
                "dataset.eval_fraction splits numbered samples, and dataset.train is a "
                f"{type(train).__name__}; name another in dataset.eval"
            )
        parts = shuffled_split(
            len(train), self.eval_fraction, seed=self.split_seed, noun="samples", place=self.name
        )
        return {name: Subset(train, numbers) for name, numbers in parts.items()}


def _prepared(split: LoaderSplit) -> list[Tensor]:
    """Return the inputs and the targets of a split, each in one tensor."""
    before = generator_states()
    first = next(replace(split, num_workers=0).load([Piece(range(1))], seed=0))
    if moved(before):
        raise UserError(
            f"the {split.name} samples draw random numbers, and prepared they would be the same in "
            f"each epoch; {FALSE}, or leave that to dataset.augmentation"
        )
    is_pair = isinstance(first, list | tuple) and len(first) == 2
    if not is_pair or not all(isinstance(one, Tensor) for one in first):
        raise UserError(
            f"a {split.name} sample becomes a batch of type {type(first).__name__}, and only pairs "
            f"of tensors (input, target) are prepared; {FALSE}"
        )
    needed, memory = sum(one.nbytes for one in first) * len(split), memory_bytes()
    if needed > memory / 2:
        raise UserError(
            f"the {len(split):,} {split.name} samples take {needed / 2**30:.1f} GiB, more than "
            f"half of the {memory / 2**30:.1f} GiB of memory; {FALSE}, or make them smaller"
        )
    whole = [torch.empty((len(split), *one.shape[1:]), dtype=one.dtype) for one in first]
    starts = range(0, len(split), PREPARED_AT_ONCE)
    pieces = [Piece(range(start, min(start + PREPARED_AT_ONCE, len(split)))) for start in starts]
    for start, batch in zip(starts, split.load(pieces, seed=0), strict=True):
        for tensor, part in zip(whole, batch, strict=True):
            if part.shape[1:] != tensor.shape[1:]:
                raise UserError(
                    f"the {split.name} samples from {start} on have the shape "
                    f"{tuple(part.shape[1:])}, and the first {tuple(tensor.shape[1:])}; let "
                    f"the transform give all one shape, or {FALSE}"
                )
            tensor[start : start + len(part)] = part
    return whole
