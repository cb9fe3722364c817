"""Samples in tar shards: pictures and their classes, or whatever a function of the user's decodes.

The shards stay where they are. What is prepared, once a machine, is their index.
"""

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.dataset import Augmentation, Dataset
from ddp_runner.data.loader import Collate, LoaderSplit
from ddp_runner.data.loading import require_function
from ddp_runner.data.pictures import SUFFIXES, PictureDecoder
from ddp_runner.data.shards import ShardIndex, ShardSamples, index_shards
from ddp_runner.data.sources import shared
from ddp_runner.errors import UserError, os_errors

CLASS = "cls"  # the ending of the file with a sample's class, a number as text


@dataclass(frozen=True)
class Shards:
    """Tar files in ``folder``, of which some are for training and the others for evaluation.

    Without `decode` each sample has a picture and a file KEY.cls with its class.
    """

    name: str
    folder: str  # under data_root
    train: str = "train-*.tar"  # the names of the training shards
    eval: str = "val-*.tar"
    num_classes: int | None = None  # None, with decode only: the targets are not classes
    decode: Callable[[Mapping[str, bytes]], Any] | None = None  # {ending: content} -> sample
    collate_fn: Collate | None = None  # None: torch's default_collate
    # Of pictures; with decode they only serve the model's keys.
    channels: int = 3
    height: int = 224  # pixels
    width: int = 224
    mean: float | Sequence[float] = 0.0  # of the pixels scaled to 0..1, or one per channel
    std: float | Sequence[float] = 1.0
    augmentation: Augmentation | None = None
    train_transform: Any = None  # takes a PIL picture; None: scaled and centre-cropped
    eval_transform: Any = None
    num_workers: int | None = None  # None: as many as the rank has threads
    prefetch_factor: int = 2
    persistent_workers: bool = True
    pin_memory: bool | None = None

    def __post_init__(self) -> None:
        if self.decode is None:
            shared.validate_pictures(self)
        require_function(
            "decode", self.decode, fix="{_target_: my_package.decode, _partial_: true}"
        )
        if self.decode is None and self.num_classes is None:
            raise UserError(
                "dataset.num_classes is missing; write dataset.num_classes=N, or name a function "
                "that decodes samples of another kind: dataset.decode"
            )

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return path, size and modification time of each shard."""
        shards = [path for split in self._shards(data_root).values() for path in split]
        stats = [(str(path.absolute()), path.stat()) for path in shards]
        return {
            "splits": [self.train, self.eval],
            "shards": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Index the shards: the inputs are the places of the samples, the targets their marks.

        Raises:
            UserError: no shard is found, one is damaged, or a folder cannot be read.
        """
        tensors = {}
        for split, paths in self._shards(data_root).items():
            index = index_shards(paths)
            facts = json.dumps([index.paths, index.endings])
            tensors[f"{split}_inputs"], tensors[f"{split}_targets"] = index.places, index.marks
            tensors[split] = torch.frombuffer(bytearray(facts.encode()), dtype=torch.uint8)
        return tensors

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the dataset that an index describes.

        Raises:
            UserError: a key of the workers is out of range.
        """
        return Dataset(
            self.name,
            self._split("train", tensors, self.train_transform),
            self._split("eval", tensors, self.eval_transform),
            num_classes=self.num_classes,
            mean=None if self.decode else self.mean,
            std=self.std,
            augmentation=None if self.decode else self.augmentation,
        )

    def _split(self, name: str, tensors: Mapping[str, Tensor], transform: Any) -> LoaderSplit:
        paths, endings = json.loads(bytes(tensors[name].tolist()))
        index = ShardIndex(paths, endings, tensors[f"{name}_inputs"], tensors[f"{name}_targets"])
        decode = self.decode
        if decode is None:
            assert self.num_classes is not None
            decoder = PictureDecoder(self.channels, self.height, self.width, transform)
            decode = PictureAndClass(decoder, self.num_classes)
        return shared.loader_split(self, name, ShardSamples(index, decode))

    def _shards(self, data_root: Path) -> dict[str, list[Path]]:
        found = {}
        for key, pattern in (("train", self.train), ("eval", self.eval)):
            found[key] = sorted(_glob(data_root / self.folder, pattern))
            if not found[key]:
                raise UserError(
                    f"{(data_root / self.folder).absolute()} holds no shards named {pattern}; name "
                    f"the folder with data_root and dataset.folder, or write dataset.{key}=PATTERN"
                )
        return found


def _glob(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files of a pattern; ``Path.glob`` leaves out those in folders it may not read."""
    above = folder.glob(str(Path(pattern).parent)) if "/" in pattern else ()
    for place in (folder, *above):
        fix = "make it readable, or name another folder with data_root and dataset.folder"
        with (
            os_errors(f"{place.absolute()} cannot be read", fix=fix),
            suppress(FileNotFoundError, NotADirectoryError),  # there is no shard in it
        ):
            os.scandir(place).close()
    yield from folder.glob(pattern)


@dataclass(frozen=True)
class PictureAndClass:
    """Decodes a sample of an ordinary set of pictures to (pixels, class)."""

    decoder: PictureDecoder
    num_classes: int

    def __call__(self, files: Mapping[str, bytes]) -> tuple[Any, int]:
        """Return the picture and its class.

        Raises:
            UserError: a file is missing or damaged.
        """
        kinds = [ending for ending in files if f".{ending}" in SUFFIXES]
        if len(kinds) != 1 or CLASS not in files:
            raise UserError(
                f"it has {', '.join(files)}, and must have one picture and one {CLASS}; write "
                "dataset.decode for samples of another kind"
            )
        text = files[CLASS].decode(errors="replace").strip()
        if not text.isdecimal() or int(text) >= self.num_classes:
            raise UserError(
                f"its class ({text}) must be from 0 to {self.num_classes - 1}; mend it, or write "
                "another dataset.num_classes"
            )
        return self.decoder(io.BytesIO(files[kinds[0]]), name=f"its {kinds[0]}"), int(text)
