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

from ddp_runner.data.dataset import Augmentation, image_dataset
from ddp_runner.data.downloads import REMEDY, fetch_missing, stamps, validate_labels
from ddp_runner.errors import UserError

SHAPE = (3, 32, 32)  # of an image: red, green and blue planes
LAYOUTS = {  # files of the train split, the eval split, the key of the labels, torchvision's class
    "cifar-10-batches-py": (
        [f"data_batch_{i}" for i in range(1, 6)],
        ["test_batch"],
        "labels",
        "CIFAR10",
    ),
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
        files = self._files(data_root, 0) + self._files(data_root, 1)
        return {"num_classes": self.num_classes, "folder": self.folder, "files": stamps(files)}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read the files and download missing ones; images are uint8 ``(n, 3, 32, 32)``.

        Raises:
            UserError: a file is missing and cannot be downloaded, or is damaged.
        """
        *_, key, torchvision_class = LAYOUTS[self.folder]
        files = [self._files(data_root, part) for part in (0, 1)]
        fetch_missing(
            files[0] + files[1],
            name=self.name,
            torchvision_class=torchvision_class,
            data_root=data_root,
        )
        tensors = {}
        for split, paths in zip(("train", "eval"), files, strict=True):
            batches = [read_batch(path, key=key) for path in paths]
            for path, (_, labels) in zip(paths, batches, strict=True):
                validate_labels(labels, num_classes=self.num_classes, path=path)
            tensors[f"{split}_inputs"] = torch.cat([images for images, _ in batches])
            tensors[f"{split}_targets"] = torch.cat([labels for _, labels in batches])
        return tensors

    dataset = image_dataset

    def _files(self, data_root: Path, part: int) -> list[Path]:
        return [data_root / self.folder / name for name in LAYOUTS[self.folder][part]]


def read_batch(path: Path, *, key: str) -> tuple[Tensor, Tensor]:
    """Return a batch's images, uint8 ``(n, 3, 32, 32)``, and its labels, int64 ``(n,)``.

    Args:
        path: of the pickled batch.
        key: of the labels in the batch.

    Raises:
        UserError: the file is damaged, of another format, or names code to run.
    """
    try:
        with path.open("rb") as file:
            batch = _BatchReader(file, encoding="bytes").load()
        batch = {_text(name): value for name, value in batch.items()}
        images, labels = batch["data"].tensor().reshape(-1, *SHAPE), torch.tensor(batch[key])
        if labels.dtype != torch.int64 or labels.shape != (len(images),):
            raise ValueError(f"it has {labels.numel()} labels for {len(images)} images")
    except Exception as error:  # damaged bytes raise any kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is not a whole batch of CIFAR ({reason}); {REMEDY}") from error
    return images, labels


class _Array:
    """Stands in for numpy's array: keeps an array's pickled state and runs nothing."""

    def __init__(self, *_: object) -> None:
        self.state: Sequence[Any] = ()

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        """Return the array (rows, columns), which must be of bytes and in C order."""
        _, shape, dtype, is_fortran, data = self.state
        if dtype.code != "u1" or is_fortran:
            raise ValueError("its pixels are not bytes in C order")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


class _Dtype:
    """Stands in for numpy's dtype: keeps only its code."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = _text(code)

    def __setstate__(self, state: object) -> None:
        pass


class _BatchReader(pickle.Unpickler):
    """Reads pickled mappings, lists, numbers, texts and numpy arrays; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = {"_reconstruct": _Array, "ndarray": _Array, "dtype": _Dtype}.get(name)
        if module.partition(".")[0] != "numpy" or stand_in is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return stand_in


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
