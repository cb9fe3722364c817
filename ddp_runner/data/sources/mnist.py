"""MNIST and Fashion-MNIST from their IDX files, plain or gzipped, in torchvision's folders.

The format: http://yann.lecun.com/exdb/mnist/ (big-endian magic number, sizes, then bytes).
"""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddp_runner.data.dataset import Augmentation
from ddp_runner.data.sources import shared
from ddp_runner.errors import UserError

IMAGES_MAGIC = 0x803  # unsigned bytes in 3 dimensions
LABELS_MAGIC = 0x801  # unsigned bytes in 1 dimension
# The four files and, for dataset.name=mnist, the SHA-256 of each when unpacked. A user's own files
# take another name.
PUBLISHED = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@dataclass(frozen=True)
class IdxImages:
    """60000 train and 10000 eval images of 28x28 grey pixels, in ``data_root/folder/raw``.

    Each file may be plain or ``.gz``, as it is published and as Debian packages it.
    """

    name: str
    folder: str  # MNIST or FashionMNIST: also the name of torchvision's class
    mean: float  # of the train split's pixels, scaled to 0..1
    std: float
    num_classes: int = 10
    channels: int = 1  # more: the grey pixels repeated
    augmentation: Augmentation | None = None

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields that count, and size and modification time of each file."""
        return {
            "folder": self.folder,
            "num_classes": self.num_classes,
            "channels": self.channels,
            "files": shared.stamps(self._files(data_root)),
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read the files and download missing ones; images are uint8 ``(n, channels, 28, 28)``.

        Raises:
            UserError: a file is missing and cannot be downloaded, or is damaged.
        """
        shared.require_at_least(self, channels=1)
        files = self._files(data_root)
        shared.fetch_missing(
            files, name=self.name, torchvision_class=self.folder, data_root=data_root
        )
        tensors = {}
        published = PUBLISHED if self.name == "mnist" else {}
        files = self._files(data_root)  # again: a download may have unpacked some
        for split, (images_path, labels_path) in (("train", files[:2]), ("eval", files[2:])):
            images = read_idx(images_path, magic=IMAGES_MAGIC, published=published)
            labels = read_idx(labels_path, magic=LABELS_MAGIC, published=published)
            if len(labels) != len(images):
                raise UserError(
                    f"{labels_path} has {len(labels)} labels, expected {len(images)}, one for each "
                    f"image in {images_path.name}; replace both files"
                )
            images = images.unsqueeze(1).expand(-1, self.channels, -1, -1)
            tensors[f"{split}_inputs"] = images.contiguous()
            tensors[f"{split}_targets"] = labels.long()
        return tensors

    dataset = shared.image_dataset

    def _files(self, data_root: Path) -> list[Path]:
        """Return the files in the order of PUBLISHED, each gzipped if there is no plain one."""
        files = []
        for name in PUBLISHED:
            plain = data_root / self.folder / "raw" / name
            gzipped = plain.with_name(f"{name}.gz")
            files.append(gzipped if gzipped.exists() and not plain.exists() else plain)
        return files


def read_idx(path: Path, *, magic: int, published: Mapping[str, str]) -> Tensor:
    """Return the uint8 tensor in an IDX file; a ``.gz`` file is unpacked in memory.

    The last byte of the magic number counts the dimensions. `published` has the SHA-256 of unpacked
    files by name; other files may hold anything.

    Raises:
        UserError: the file cannot be read or unpacked, or its magic number, size or SHA-256 is
            wrong.
    """
    try:
        data = bytearray(path.read_bytes())
        if path.suffix == ".gz":
            data = bytearray(gzip.decompress(data))
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path} cannot be read ({reason}); {shared.REMEDY}") from error
    header = struct.Struct(f">{1 + (magic & 0xFF)}I")
    if len(data) < header.size:
        raise UserError(
            f"{path} has {len(data)} bytes, expected at least {header.size}; {shared.REMEDY}"
        )
    found, *shape = header.unpack_from(data)
    if found != magic:
        raise UserError(
            f"{path} begins with the magic number {found:#010x}, expected {magic:#010x}; "
            f"{shared.REMEDY}"
        )
    size = header.size + math.prod(shape)
    if len(data) != size or 0 in shape:
        raise UserError(
            f"{path} has {len(data)} bytes, expected {size} for the sizes in its header "
            f"({' x '.join(map(str, shape))}); {shared.REMEDY}"
        )
    expected = published.get(path.name.removesuffix(".gz"))
    if expected is not None and (digest := hashlib.sha256(data).hexdigest()) != expected:
        raise UserError(
            f"{path} has SHA-256 {digest}, expected {expected}, the published file's; "
            f"{shared.REMEDY}, or write dataset.name=NAME if it is a file of your own"
        )
    return torch.frombuffer(data, dtype=torch.uint8, offset=header.size).reshape(shape)
