"""A user's own pictures, one folder per class: prepared once, or decoded while the model trains.

Pictures are prepared if they fit in half of the memory at the size that the model gets. Both ways
give the same samples in the same order.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.dataset import Augmentation, Dataset
from ddp_runner.data.pictures import PictureDecoder, PictureFiles, Samples
from ddp_runner.data.sources import shared
from ddp_runner.data.sources.picture_folders import SPLIT_SEED, digest_of_files, find_pictures
from ddp_runner.errors import UserError, counted
from ddp_runner.host.hardware import memory_bytes


@dataclass(frozen=True)
class ImageFolder:
    """Pictures in ``folder/train/CLASS/`` and ``folder/val/CLASS/`` or ``folder/eval/CLASS/``.

    With ``eval_fraction`` the pictures are in ``folder/CLASS/`` and are split here. Classes are
    numbered by the order of their names. Pictures may be in subfolders; other files and hidden
    folders are ignored.
    """

    name: str
    folder: str  # under data_root
    height: int  # pixels
    width: int
    mean: float | Sequence[float]  # of the pixels scaled to 0..1, or one per channel
    std: float | Sequence[float]
    num_classes: int
    channels: int = 3  # 1: grey
    eval_fraction: float | None = None  # of the pictures; None: each split has a folder
    augmentation: Augmentation | None = None
    prepared: bool | None = None  # None: if they fit in memory, and no transform changes them
    train_transform: Any = None  # takes a PIL picture; None: scaled and centre-cropped
    eval_transform: Any = None
    # Of pictures that are not prepared; see ``LoaderSplit``.
    num_workers: int | None = None  # None: as many as the rank has threads
    prefetch_factor: int = 2
    persistent_workers: bool = True
    pin_memory: bool | None = None

    def __post_init__(self) -> None:
        shared.validate_pictures(self)
        for key in ("train_transform", "eval_transform"):
            if getattr(self, key) is not None and self.prepared:
                raise UserError(
                    f"dataset.prepared=true leaves no place for dataset.{key}, which may change a "
                    "picture anew in each epoch; leave one of them out"
                )
        if self.eval_fraction is not None:
            fix = "use 0.1, or null where folders hold the splits"
            shared.require_eval_fraction(self.eval_fraction, fix=fix)

    def open(self, data_root: Path) -> Dataset | None:
        """Return the dataset of pictures that stay in their files; None: they are prepared.

        Raises:
            UserError: the folders or the keys of the workers are unusable.
        """
        samples = self._samples(data_root)
        reason = self._why_unprepared(samples)
        if reason is None:
            return None
        train, rest = (
            shared.loader_split(self, name, PictureFiles(samples[name], self._decoder(transform)))
            for name, transform in (("train", self.train_transform), ("eval", self.eval_transform))
        )
        workers = train.num_workers
        who = f"{counted(workers, 'worker')} of each rank" if workers else "the ranks themselves"
        return Dataset(
            self.name,
            train,
            rest,
            num_classes=self.num_classes,
            mean=self.mean,
            std=self.std,
            augmentation=self.augmentation,
            notes=(
                f"dataset {self.name}: {len(train):,} + {len(rest):,} pictures are decoded while "
                f"the model trains, by {who}, since {reason}",
            ),
            digest=f"files:{digest_of_files(samples, data_root / self.folder)}",
        )

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the shape, and a digest of the files' names, sizes and modification times."""
        return {
            "shape": [self.channels, self.height, self.width],
            "eval_fraction": self.eval_fraction,
            "split_seed": SPLIT_SEED,
            "files": digest_of_files(self._samples(data_root)),
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Decode all pictures to uint8 ``(n, channels, height, width)``, scaled and centre-cropped.

        Raises:
            UserError: a folder is missing or empty, the classes of the splits differ or do not
                match num_classes, the pictures do not fit in memory, or a picture is damaged.
        """
        tensors, found = {}, self._samples(data_root)
        if not self._fits(found):
            raise UserError(
                f"dataset.prepared=true, and {self._sizes(found)}; write dataset.prepared=false, "
                "or use a smaller dataset.height and dataset.width"
            )
        for split, samples in found.items():
            tensors[f"{split}_inputs"] = self._decode([path for path, _ in samples])
            tensors[f"{split}_targets"] = torch.tensor([label for _, label in samples])
        return tensors

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset of the prepared pictures, which stay memory-mapped."""
        dataset = shared.image_dataset(self, tensors)
        num_train, num_eval = (len(tensors[f"{split}_targets"]) for split in ("train", "eval"))
        note = f"dataset {self.name}: {num_train:,} + {num_eval:,} pictures are in the cache, " + (
            "since dataset.prepared=true"
            if self.prepared
            else "since they fit in half of the memory"
        )
        return replace(dataset, notes=(note,))

    def sample_names(self, data_root: Path) -> dict[str, list[str]]:
        """Return the files of each split in their order, by their paths below the folder.

        Raises:
            UserError: a folder is missing or empty, or the classes do not match.
        """
        prefix = f"{data_root / self.folder}{os.sep}"
        return {
            split: [path.removeprefix(prefix) for path, _ in samples]
            for split, samples in self._samples(data_root).items()
        }

    def _why_unprepared(self, samples: Mapping[str, Samples]) -> str | None:
        """Return why the pictures stay in their files; None: they are prepared."""
        if self.prepared is not None:
            return None if self.prepared else "dataset.prepared=false"
        for key in ("train_transform", "eval_transform"):
            if getattr(self, key) is not None:
                return f"dataset.{key} changes them"
        return None if self._fits(samples) else self._sizes(samples)

    def _fits(self, samples: Mapping[str, Samples]) -> bool:
        return self._bytes(samples) <= memory_bytes() / 2

    def _bytes(self, samples: Mapping[str, Samples]) -> int:
        """Return the size of the decoded pictures of both splits."""
        return sum(map(len, samples.values())) * self.channels * self.height * self.width

    def _sizes(self, samples: Mapping[str, Samples]) -> str:
        decoded, memory = (size / 2**30 for size in (self._bytes(samples), memory_bytes()))
        return (
            f"decoded to {self.height}x{self.width} pixels they take {decoded:.1f} GiB, more than "
            f"half of the {memory:.1f} GiB of memory"
        )

    def _samples(self, data_root: Path) -> dict[str, Samples]:
        root = data_root / self.folder
        return find_pictures(root, num_classes=self.num_classes, eval_fraction=self.eval_fraction)

    def _decoder(self, transform: Any = None) -> PictureDecoder:
        return PictureDecoder(self.channels, self.height, self.width, transform)

    def _decode(self, paths: Sequence[str]) -> Tensor:
        """Return all pictures of a split, uint8 (n, channels, height, width)."""
        decoder = self._decoder()
        images = torch.empty(
            (len(paths), self.channels, self.height, self.width), dtype=torch.uint8
        )
        with ThreadPoolExecutor() as pool:  # Pillow releases the interpreter lock
            for image, pixels in zip(images, pool.map(decoder, paths), strict=True):
                image.copy_(pixels)
        return images
