"""A dataset that a config names, map-style or iterable: torchvision's, or one of your own.

It is loaded sample by sample while the model trains, or prepared once: then its samples are two
tensors in the cache, and torchvision, whose import takes seconds, is not imported again.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, default_collate

from ddp_runner.data.dataset import Augmentation, Dataset
from ddp_runner.data.loader import Collate, LoaderSplit
from ddp_runner.data.sources.shared import (
    files_digest,
    first_batch,
    image_dataset,
    prepared,
    shuffled_split,
    with_facts,
)
from ddp_runner.data.splits import AbsentSplit, Split
from ddp_runner.data.stream import StreamSplit
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import memory_bytes


@dataclass(frozen=True)
class Deferred:
    """A dataset of the config that is built when it is needed."""

    keys: Mapping[str, Any]
    build: Callable[[], Any]


@dataclass(frozen=True)
class TorchDataset:
    """Two datasets, such as torchvision's, or the one that is used, and how they are loaded.

    Each is anything with ``__len__`` and ``__getitem__``, or a stream: a torch ``IterableDataset``,
    or anything with ``__iter__`` alone. A sample may be any tree of tensors and numbers, or
    whatever `collate_fn` makes a batch of. Prepared samples are pairs of tensors or numbers. What
    the keys exclude of each other is validated before ranks start: ``config/rules.py``.
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
    transform: Callable[[Any], Any] | None = None  # of a sample, before collate_fn
    collate_fn: Collate | None = None  # None: torch's default_collate
    num_workers: int | None = 0  # processes of each rank that load; None: as many as it has threads
    prefetch_factor: int = 2  # batches that each of them loads ahead
    persistent_workers: bool = True  # not those of a stream: they end with its epoch
    pin_memory: bool | None = None  # None: on a GPU
    shuffle_buffer: int = 0  # of a training stream: samples that are shuffled at a time; 0: none
    # Facts for other keys to follow, as in model.in_channels=${dataset.channels}.
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # what prepared samples follow from

    def __post_init__(self) -> None:
        """Reject what should be a function and is none."""
        for key in ("transform", "collate_fn"):
            if (given := getattr(self, key)) is not None and not callable(given):
                raise UserError(
                    f"dataset.{key} ({given}) cannot be called; write "
                    f"dataset.{key}={{_target_:my_package.{key},_partial_:true}}"
                )

    def open(self, data_root: Path) -> Dataset | None:
        """Return the datasets as splits; None: they are to be prepared.

        Raises:
            UserError: a dataset is of another kind, or a key is out of range.
        """
        if self.prepare:
            return None
        train, rest = self._splits(data_root).values()
        is_part = isinstance(getattr(rest, "dataset", None), Subset)
        if self.eval_fraction is not None and is_part and first_batch(rest)[1]:
            raise UserError(
                "the training samples draw random numbers, and the part of them that "
                "dataset.eval_fraction evaluates would be another each time; name others in "
                "dataset.eval or dataset.eval_split, and draw in dataset.train alone"
            )
        digest = None if self.folder is None else f"files:{'-'.join(self._digests(data_root))}"
        return replace(with_facts(self, train, rest), digest=digest)

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the keys, the source of what they name, and the files with their times."""
        split = [self.eval_fraction, self.split_seed, self.num_classes]
        files = self._digests(data_root, with_times=True)
        return {"facts": self.facts, "split": split, "files": files}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Load all samples once.

        Raises:
            UserError: they are no pairs of tensors of one shape, are drawn at random, do not fit in
                memory, or one cannot be loaded.
        """
        tensors, room = dict[str, Tensor](), memory_bytes() / 2
        for name, split in self._splits(data_root).items():
            room -= sum(one.nbytes for one in tensors.values())
            tensors[f"{name}_inputs"], tensors[f"{name}_targets"] = prepared(split, room)
        return tensors

    dataset = image_dataset  # of prepared samples, which stay memory-mapped

    def sample_names(self, data_root: Path) -> dict[str, list[str]]:
        """Return the files of each split, if they are an ImageFolder's, by their paths below it."""
        names = {}
        for name, dataset in self._built(data_root).items():
            is_part = isinstance(dataset, Subset)
            if files := getattr(dataset.dataset if is_part else dataset, "imgs", None):
                numbers = dataset.indices if is_part else range(len(files))
                base = data_root / (self.folder or "")
                names[name] = [os.path.relpath(files[number][0], base) for number in numbers]
        return names

    def _digests(self, data_root: Path, *, with_times: bool = False) -> list[str]:
        """Return the digests of the folder, and of what train and eval read elsewhere."""
        places = [folder := data_root / str(self.folder)]
        for one in (self.train, self.eval):
            keys = one.keys if isinstance(one, Deferred) else {}
            root = Path(keys.get("root", folder))
            if not (root.is_relative_to(folder) or folder.is_relative_to(root)):
                places.append(root)
        return [files_digest(place, with_times=with_times) for place in places]

    def _splits(self, data_root: Path) -> dict[str, Split]:
        return {name: self._split(name, one) for name, one in self._built(data_root).items()}

    def _split(self, name: str, dataset: Any) -> Split:
        """Return the samples of a dataset as they are loaded: by their numbers, or as a stream."""
        if dataset is None or isinstance(dataset, Mapping):
            return AbsentSplit(
                f"dataset.{name} has no _target_; name your Dataset: "
                f"dataset.{name}={{_target_:my_package.MyDataset}}"
                + (", or write dataset.eval_fraction=0.1" if name == "eval" else "")
            )
        keys = ("transform", "num_workers", "prefetch_factor", "pin_memory")
        loading: Any = {key: getattr(self, key) for key in keys}
        loading["collate_fn"] = self.collate_fn or default_collate
        if self.num_workers is None:  # the ranks of a machine have shared its cores among them
            loading["num_workers"] = torch.get_num_threads()
        buffer, kind = self.shuffle_buffer if name == "train" else 0, type(dataset).__name__
        has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if has_numbers and not isinstance(dataset, IterableDataset):
            if buffer:
                raise UserError(
                    f"dataset.shuffle_buffer ({buffer}) is for streams; dataset.{name} is a {kind} "
                    "with __len__, whose samples come in another order in each epoch anyway; leave "
                    "it out"
                )
            return LoaderSplit(name, dataset, persistent_workers=self.persistent_workers, **loading)
        if not isinstance(dataset, Iterable):
            raise UserError(
                f"dataset.{name} is a {kind}, which lacks __len__ or __getitem__; give your class "
                "both, or __iter__ for a stream"
            )
        return StreamSplit(name, dataset, shuffle_buffer=buffer, **loading)

    def _both(self, data_root: Path) -> tuple[Any, Any]:
        """Return what train and eval name."""
        both = [self.train, self.eval]
        train, rest = [one.build() if isinstance(one, Deferred) else one for one in both]
        return train, rest

    def _built(self, data_root: Path) -> dict[str, Any]:
        """Return the datasets, of which the one to evaluate may be a part of the other.

        Raises:
            UserError: one cannot be built or split, or their classes are not num_classes.
        """
        train, rest = self._both(data_root)
        # An ImageFolder numbers its classes by their names, so a missing one moves the others.
        named = [one for one in (train, rest) if getattr(one, "target_transform", None) is None]
        classes = [set(getattr(one, "class_to_idx", None) or ()) for one in named]
        if len(classes) == 2 and all(classes) and (only := classes[0] ^ classes[1]):
            raise UserError(
                f"the classes of dataset.train and dataset.eval differ: {', '.join(sorted(only))} "
                "is in only one of them; give both the same classes"
            )
        for found in filter(None, classes):
            if self.num_classes not in (None, len(found)):
                raise UserError(
                    f"dataset={self.name} has {len(found)} classes, and dataset.num_classes is "
                    f"{self.num_classes}; write dataset.num_classes={len(found)}"
                )
        if self.eval_fraction is None or rest is not None:
            return {"train": train, "eval": rest}
        if isinstance(train, IterableDataset) or not hasattr(train, "__len__"):
            kind = f"dataset.train is a {type(train).__name__}, which dataset.eval_fraction"
            raise UserError(f"{kind} cannot split; name another in dataset.eval")
        parts = shuffled_split(
            len(train), self.eval_fraction, seed=self.split_seed, noun="samples", place=self.name
        )
        return {name: Subset(train, numbers) for name, numbers in parts.items()}
