"""CIFAR-10 and CIFAR-100 from their Python batches, in torchvision's folders.

The format: https://www.cs.toronto.edu/~kriz/cifar.html (pickled mappings of arrays). Loading a
pickle runs whatever code it names, so our reader accepts nothing but numpy's arrays.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.dataset import Augmentation
from ddp_runner.data.sources import shared
from ddp_runner.errors import UserError, typed

SHAPE = (3, 32, 32)  # of an image: red, green and blue planes
TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
LAYOUTS = {  # files of the train split, the eval split, the key of the labels, torchvision's class
    "cifar-10-batches-py": (TRAIN_BATCHES, ["test_batch"], "labels", "CIFAR10"),
    "cifar-100-python": (["train"], ["test"], "fine_labels", "CIFAR100"),
}


@dataclass(frozen=True)
class Cifar:
    """50000 train and 10000 eval images of 32x32 colour pixels, in ``data_root/folder``."""

    name: str
    folder: str  # cifar-10-batches-py or cifar-100-python
    mean: Sequence[float]  # of each channel of the train split's pixels, scaled to 0..1
    std: Sequence[float]
    num_classes: int
    channels: int = 3
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.folder not in LAYOUTS:
            raise UserError(f"dataset.folder ({self.folder}) must be one of {', '.join(LAYOUTS)}")
        if self.channels != SHAPE[0]:
            raise UserError(
                f"dataset.channels ({self.channels}) must be 3: the images have colours"
            )

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields that count, and size and modification time of each file."""
        train, rest = self._files(data_root)
        files = shared.stamps(train + rest)
        return {"num_classes": self.num_classes, "folder": self.folder, "files": files}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read the files and download missing ones; images are uint8 ``(n, 3, 32, 32)``.

        Raises:
            UserError: a file is missing and cannot be downloaded, or is damaged.
        """
        *_, key, kind = LAYOUTS[self.folder]
        train, rest = self._files(data_root)
        shared.fetch_missing(
            train + rest, name=self.name, torchvision_class=kind, data_root=data_root
        )
        tensors: dict[str, Tensor] = {}
        for split, paths in (("train", train), ("eval", rest)):
            batches = [read_batch(path, key=key) for path in paths]
            images, targets = map(torch.cat, zip(*batches, strict=True))
            tensors |= {f"{split}_inputs": images, f"{split}_targets": targets}
        return tensors

    dataset = shared.image_dataset

    def _files(self, data_root: Path) -> list[list[Path]]:
        folder = data_root / self.folder
        return [[folder / name for name in names] for names in LAYOUTS[self.folder][:2]]


def read_batch(path: Path, *, key: str) -> tuple[Tensor, Tensor]:
    """Return a batch's images, uint8 ``(n, 3, 32, 32)``, and the labels of a key, int64 ``(n,)``.

    Raises:
        UserError: the file is damaged, of another format, or names code to run.
    """
    try:
        with path.open("rb") as file:
            batch = _BatchReader(file, encoding="bytes").load()
        batch = {_text(name): value for name, value in batch.items()}
        _, shape, dtype, is_fortran, data = batch["data"].state
        if _text(dtype.arguments[0]) != "u1" or is_fortran:
            raise ValueError("its pixels are not bytes in C order")
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)
        images, labels = pixels.reshape(-1, *SHAPE), torch.tensor(batch[key])
        if labels.dtype != torch.int64 or labels.shape != (len(images),):
            raise ValueError(f"it has {labels.numel()} labels for {len(images)} images")
    except Exception as error:  # damaged bytes raise any kind
        reason = typed(error)
        message = f"{path} is not a whole batch of CIFAR ({reason}); {shared.REMEDY}"
        raise UserError(message) from error
    return images, labels


class _Inert:
    """Stands in for numpy's array and dtype: keeps their pickled values, and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _BatchReader(pickle.Unpickler):
    """Reads pickled mappings, lists, numbers, texts and numpy arrays; rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Inert
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
