"""MNIST and Fashion-MNIST from their IDX files, laid out as torchvision does.

The format: http://yann.lecun.com/exdb/mnist/ (big-endian magic number, sizes, then bytes).
"""

import contextlib
import math
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor

from ddp_runner.data.source import Dataset, splits
from ddp_runner.errors import UserError

IMAGES_MAGIC = 0x803  # unsigned bytes in 3 dimensions
LABELS_MAGIC = 0x801  # unsigned bytes in 1 dimension
REMEDY = "replace the file, or delete it to have it downloaded"
DOWNLOAD_TIMEOUT_S = 10  # without an answer; torchvision itself would wait for ever


@dataclass(frozen=True)
class IdxImages:
    """60000 train and 10000 eval images of 28x28 grey pixels, in ``data_root/folder/raw``."""

    name: str
    folder: str  # MNIST or FashionMNIST: also the name of torchvision's class
    mean: float  # of the train split's pixels, scaled to 0..1
    std: float
    num_classes: int = 10

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Size and modification time of each file; None for a missing one."""
        stats = {
            path.name: path.stat() if path.exists() else None for path in self._files(data_root)
        }
        return {
            "folder": self.folder,
            "num_classes": self.num_classes,
            "files": {
                name: stat and [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()
            },
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read the files, downloading what is missing; images as uint8 ``(n, 1, 28, 28)``.

        Raises:
            UserError: a file is missing and cannot be downloaded, or is damaged.
        """
        if not all(path.exists() for path in self._files(data_root)):
            self._download(data_root)
        tensors = {}
        for split, prefix in (("train", "train"), ("eval", "t10k")):
            images_path, labels_path = self._pair(data_root, prefix)
            images = read_idx(images_path, magic=IMAGES_MAGIC)
            labels = read_idx(labels_path, magic=LABELS_MAGIC)
            if len(labels) != len(images):
                raise UserError(
                    f"{labels_path} has {len(labels)} labels, expected {len(images)}, one for each "
                    f"image in {images_path.name}; replace both files"
                )
            if (largest := int(labels.max())) >= self.num_classes:
                position = int(labels.argmax())
                raise UserError(
                    f"{labels_path} has label {largest} for sample {position}, expected 0 to "
                    f"{self.num_classes - 1}; {REMEDY}"
                )
            tensors[f"{split}_inputs"] = images.unsqueeze(1)
            tensors[f"{split}_targets"] = labels.long()
        return tensors

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Images to be normalised."""
        return Dataset(
            self.name,
            *splits(tensors),
            num_classes=self.num_classes,
            mean=self.mean,
            std=self.std,
        )

    def _pair(self, data_root: Path, prefix: str) -> tuple[Path, Path]:
        raw = data_root / self.folder / "raw"
        return raw / f"{prefix}-images-idx3-ubyte", raw / f"{prefix}-labels-idx1-ubyte"

    def _files(self, data_root: Path) -> tuple[Path, ...]:
        return self._pair(data_root, "train") + self._pair(data_root, "t10k")

    def _download(self, data_root: Path) -> None:
        from torchvision import datasets  # slow to import, and needed only here

        try:
            with _patient_only_for(DOWNLOAD_TIMEOUT_S), contextlib.redirect_stdout(sys.stderr):
                getattr(datasets, self.folder)(data_root, download=True)
            reason = "the download left them out"
        # torchvision also reads the files, and trips over damaged ones that read_idx names better.
        except (RuntimeError, OSError, HTTPException, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())
        missing = [path.name for path in self._files(data_root) if not path.exists()]
        if missing:
            raise UserError(
                f"dataset {self.name}: {', '.join(missing)} not found in "
                f"{(data_root / self.folder / 'raw').absolute()}, and the download failed "
                f"({reason}); copy the files into that folder, point data_root at the folder that "
                f"holds {self.folder}/raw, connect to the network once, or use dataset=digits, "
                "which is bundled and needs no network"
            )


def read_idx(path: Path, *, magic: int) -> Tensor:
    """The uint8 tensor in an IDX file; its number of dimensions is the magic number's last byte.

    Raises:
        UserError: magic number or size is not as expected.
    """
    data = bytearray(path.read_bytes())
    num_dims = magic & 0xFF
    header = struct.Struct(f">{1 + num_dims}I")
    if len(data) < header.size:
        raise UserError(f"{path} has {len(data)} bytes, expected at least {header.size}; {REMEDY}")
    found, *shape = header.unpack_from(data)
    if found != magic:
        raise UserError(
            f"{path} begins with the magic number {found:#010x}, expected {magic:#010x}; {REMEDY}"
        )
    size = header.size + math.prod(shape)
    if len(data) != size or 0 in shape:
        raise UserError(
            f"{path} has {len(data)} bytes, expected {size} for the sizes in its header "
            f"({' x '.join(map(str, shape))}); {REMEDY}"
        )
    return torch.frombuffer(data, dtype=torch.uint8, offset=header.size).reshape(shape)


@contextlib.contextmanager
def _patient_only_for(timeout_s: float) -> Iterator[None]:
    """Limit the wait of new Python sockets, of which torchvision offers no other way."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)
