"""A dataset that a config names, map-style or iterable: torchvision's, or one of your own.

It is loaded sample by sample while the model trains, or prepared once: then its samples are two
tensors in the cache, and torchvision, which takes seconds to import, is not imported again.
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
from ddp_runner.data.sources.shared import files_digest, image_dataset, shuffled_split, with_facts
from ddp_runner.data.splits import AbsentSplit, MicroPlan
from ddp_runner.data.stream import Split, StreamSplit
from ddp_runner.data.trees import shape_of
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import memory_bytes
from ddp_runner.seeds import generator_states, moved

PREPARED_AT_ONCE = 256  # samples
DO_NOT_PREPARE = "write dataset.prepare=false"


@dataclass(frozen=True)
class Deferred:
    """A dataset of the config, built on demand."""

    keys: Mapping[str, Any]
    build: Callable[[], Any]


@dataclass(frozen=True)
class TorchDataset:
    """Two datasets, or one to split, and how they are loaded.

    Each is any object with ``__len__`` and ``__getitem__``, or a stream: a torch
    ``IterableDataset``, or any object with ``__iter__`` alone. A sample is a tree of tensors and
    numbers, or anything that `collate_fn` accepts. Prepared samples are pairs of tensors or
    numbers. ``config/rules.py`` rejects keys that exclude each other before ranks start.
    """

    name: str
    train: Any
    eval: Any = None
    eval_fraction: float | None = None  # part of train to evaluate, without an eval
    split_seed: int = 0  # for the data; the run has its own seed
    folder: str | None = None  # folder of the files, under data_root
    prepare: bool = False
    num_classes: int | None = None  # None: no accuracy, precision, recall and F1
    # Mean and standard deviation of pixels (uint8) scaled to 0..1, for all channels or for each.
    mean: float | Sequence[float] | None = None  # None: use batches as they are loaded
    std: float | Sequence[float] = 1.0
    augmentation: Augmentation | None = None  # of normalised images
    transform: Callable[[Any], Any] | None = None  # of a sample, before collate_fn
    collate_fn: Collate | None = None  # None: torch's default_collate
    num_workers: int | None = 0  # processes of each rank that load; None: one per thread
    prefetch_factor: int = 2  # batches that each worker loads ahead
    persistent_workers: bool = True  # a stream's workers always end with its epoch
    pin_memory: bool | None = None  # None: on a GPU
    shuffle_buffer: int = 0  # samples of a training stream to shuffle at a time; 0: none
    # For other keys to refer to, as in model.in_channels=${dataset.channels}.
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # keys that prepared samples depend on

    def __post_init__(self) -> None:
        """Reject a `transform` or `collate_fn` that is not a function."""
        for key in ("transform", "collate_fn"):
            if (function := getattr(self, key)) is not None and not callable(function):
                raise UserError(
                    f"dataset.{key} ({function}) cannot be called",
                    f"write dataset.{key}={{_target_:my_package.{key},_partial_:true}}",
                )

    def open(self, data_root: Path) -> Dataset | None:
        """Return the datasets as splits; None: the cache must prepare them.

        Raises:
            UserError: a dataset has another type, or a key is out of range.
        """
        if self.prepare:
            return None
        train, rest = self._splits(data_root).values()
        is_part = isinstance(getattr(rest, "dataset", None), Subset)
        if self.eval_fraction is not None and is_part and first_batch(rest)[1]:
            raise UserError(
                "the training samples draw random numbers, so the part that dataset.eval_fraction "
                "evaluates would differ each time",
                "name other samples in dataset.eval or "
                "dataset.eval_split, and draw in dataset.train alone",
            )
        digest = None if self.folder is None else f"files:{'-'.join(self._digests(data_root))}"
        return replace(with_facts(self, train, rest), digest=digest)

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the keys, and digests of their code and of the files with times."""
        split = [self.eval_fraction, self.split_seed, self.num_classes]
        files = self._digests(data_root, with_times=True)
        return {"facts": self.facts, "split": split, "files": files}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Load all samples once.

        Raises:
            UserError: they are not pairs of tensors of equal shapes, draw random numbers, do not
                fit in memory, or a sample cannot be loaded.
        """
        tensors, room = dict[str, Tensor](), memory_bytes() / 2
        for name, split in self._splits(data_root).items():
            room -= sum(tensor.nbytes for tensor in tensors.values())
            tensors[f"{name}_inputs"], tensors[f"{name}_targets"] = prepared(split, room)
        return tensors

    dataset = image_dataset

    def sample_names(self, data_root: Path) -> dict[str, list[str]]:
        """Return each split's files below the folder, if the dataset is an ImageFolder."""
        names = {}
        for name, dataset in self._built(data_root).items():
            is_part = isinstance(dataset, Subset)
            if files := getattr(dataset.dataset if is_part else dataset, "imgs", None):
                numbers = dataset.indices if is_part else range(len(files))
                base = data_root / (self.folder or "")
                names[name] = [os.path.relpath(files[number][0], base) for number in numbers]
        return names

    def _digests(self, data_root: Path, *, with_times: bool = False) -> list[str]:
        """Return the digests of the folder, and of other folders that train and eval read."""
        folders = [folder := data_root / str(self.folder)]
        for dataset in (self.train, self.eval):
            keys = dataset.keys if isinstance(dataset, Deferred) else {}
            root = Path(keys.get("root", folder))
            if not (root.is_relative_to(folder) or folder.is_relative_to(root)):
                folders.append(root)
        return [files_digest(folder, with_times=with_times) for folder in folders]

    def _splits(self, data_root: Path) -> dict[str, Split]:
        built = self._built(data_root)
        return {name: self._split(name, dataset) for name, dataset in built.items()}

    def _split(self, name: str, dataset: Any) -> Split:
        """Return the split of a dataset: numbered or a stream."""
        if dataset is None or isinstance(dataset, Mapping):
            return AbsentSplit(
                f"dataset.{name} has no _target_; name your Dataset: "
                f"dataset.{name}={{_target_:my_package.MyDataset}}"
                + (", or write dataset.eval_fraction=0.1" if name == "eval" else "")
            )
        keys = ("transform", "num_workers", "prefetch_factor", "pin_memory")
        loading: Any = {key: getattr(self, key) for key in keys}
        loading["collate_fn"] = self.collate_fn or default_collate
        if self.num_workers is None:  # the ranks of a machine already divide its cores
            loading["num_workers"] = torch.get_num_threads()
        buffer, kind = self.shuffle_buffer if name == "train" else 0, type(dataset).__name__
        has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if has_numbers and not isinstance(dataset, IterableDataset):
            if buffer:
                raise UserError(
                    f"dataset.shuffle_buffer ({buffer}) is for streams, and dataset.{name} is a "
                    f"{kind} with __len__, which each epoch shuffles anyway",
                    "leave it out",
                )
            return LoaderSplit(name, dataset, persistent_workers=self.persistent_workers, **loading)
        if not isinstance(dataset, Iterable):
            raise UserError(
                f"dataset.{name} is a {kind}, which lacks __len__ or __getitem__",
                "add both, or __iter__ for a stream",
            )
        return StreamSplit(name, dataset, shuffle_buffer=buffer, **loading)

    def _both(self, data_root: Path) -> tuple[Any, Any]:
        train, rest = (
            dataset.build() if isinstance(dataset, Deferred) else dataset
            for dataset in (self.train, self.eval)
        )
        return train, rest

    def _built(self, data_root: Path) -> dict[str, Any]:
        """Return the datasets; the evaluation dataset may be a part of the training dataset."""
        train, rest = self._both(data_root)
        # An ImageFolder numbers its classes by their names, so a missing class renumbers others.
        both = [item for item in (train, rest) if getattr(item, "target_transform", None) is None]
        classes = [set(getattr(item, "class_to_idx", None) or ()) for item in both]
        if len(classes) == 2 and all(classes) and (only := classes[0] ^ classes[1]):
            raise UserError(
                f"the classes of dataset.train and dataset.eval differ: {', '.join(sorted(only))} "
                "is in only one of them",
                "give both the same classes",
            )
        for names in filter(None, classes):
            if self.num_classes not in (None, len(names)):
                raise UserError(
                    f"dataset={self.name} has {len(names)} classes, and dataset.num_classes is "
                    f"{self.num_classes}",
                    f"write dataset.num_classes={len(names)}",
                )
        if self.eval_fraction is None or rest is not None:
            return {"train": train, "eval": rest}
        if isinstance(train, IterableDataset) or not hasattr(train, "__len__"):
            raise UserError(
                f"dataset.train is a {type(train).__name__}, which dataset.eval_fraction cannot "
                "split",
                "name a dataset in dataset.eval",
            )
        parts = shuffled_split(
            len(train), self.eval_fraction, seed=self.split_seed, noun="samples", origin=self.name
        )
        return {name: Subset(train, numbers) for name, numbers in parts.items()}


def first_batch(split: Split) -> tuple[Any, bool]:
    """Return a batch of the first sample, and whether loading it draws random numbers."""
    if not isinstance(split, LoaderSplit):
        raise UserError(getattr(split, "fix", f"a stream cannot be prepared; {DO_NOT_PREPARE}"))
    before = generator_states()
    batch = next(replace(split, num_workers=0).load([MicroPlan(range(1))]))
    return batch, bool(moved(before))


def prepared(split: Split, room: float) -> list[Tensor]:
    """Return all inputs and all targets of a split as tensors of at most `room` bytes."""
    first, draws = first_batch(split)
    assert isinstance(split, LoaderSplit)
    if draws:
        raise UserError(
            f"the {split.name} samples draw random numbers, and prepared they would be the same in "
            "each epoch",
            f"{DO_NOT_PREPARE}, or draw them in dataset.augmentation",
        )
    is_pair = isinstance(first, list | tuple) and len(first) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in first):
        raise UserError(
            f"a {split.name} sample becomes a batch of type {type(first).__name__}, and only pairs "
            "of tensors (input, target) can be prepared",
            f"{DO_NOT_PREPARE}",
        )
    needed = sum(part.nbytes for part in first) * len(split)
    if needed > room:
        raise UserError(
            f"the {len(split):,} {split.name} samples take {needed / 2**30:.1f} GiB, and half of "
            f"the memory leaves {room / 2**30:.1f} GiB",
            f"{DO_NOT_PREPARE}, or make them smaller",
        )
    tensors = [torch.empty((len(split), *part.shape[1:]), dtype=part.dtype) for part in first]
    starts = range(0, len(split), PREPARED_AT_ONCE)
    plans = [MicroPlan(range(start, min(start + PREPARED_AT_ONCE, len(split)))) for start in starts]
    for start, batch in zip(starts, split.load(plans), strict=True):
        for tensor, part in zip(tensors, batch, strict=True):
            if (part.shape[1:], part.dtype) != (tensor.shape[1:], tensor.dtype):
                raise UserError(
                    f"the {split.name} samples from {start} on are {shape_of(part[0])}, and the "
                    f"first {shape_of(tensor[0])}",
                    f"give all of them one shape, or {DO_NOT_PREPARE}",
                )
            tensor[start : start + len(part)] = part
    return tensors
