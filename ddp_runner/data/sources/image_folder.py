"""A user's own pictures, one folder per class, decoded and scaled once."""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddp_runner.config.values import memory_bytes
from ddp_runner.data.dataset import Augmentation
from ddp_runner.data.sources import shared
from ddp_runner.errors import UserError, typed

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_SEED = 0

Samples = list[tuple[Path, int]]  # files and their classes


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

    def __post_init__(self) -> None:
        shared.require_at_least(self, height=1, width=1)
        if self.channels not in (1, 3):
            raise UserError(f"dataset.channels ({self.channels}) must be 1 (grey) or 3 (colours)")
        for key, value in (("mean", self.mean), ("std", self.std)):
            if not isinstance(value, float | int) and len(value) != self.channels:
                raise UserError(
                    f"dataset.{key} ({list(value)}) must be one number, or one for each of "
                    f"dataset.channels ({self.channels})"
                )
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise UserError(
                f"dataset.eval_fraction ({self.eval_fraction}) must be between 0 and 1; "
                "use 0.1, or null where folders hold the splits"
            )

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the shape, and a digest of the files' names, sizes and modification times."""
        digest = hashlib.sha256()
        for samples in self._samples(data_root).values():
            for path, label in samples:
                try:
                    stat = path.stat()
                except OSError as error:  # a dangling link, or a file removed meanwhile
                    raise UserError(
                        f"{path.absolute()} cannot be read ({error.strerror}); replace or remove it"
                    ) from error
                digest.update(f"{path}\0{label}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
            digest.update(b"\n")
        return {
            "shape": [self.channels, self.height, self.width],
            "eval_fraction": self.eval_fraction,
            "split_seed": SPLIT_SEED,
            "files": digest.hexdigest(),
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Decode all pictures to uint8 ``(n, channels, height, width)``, scaled and centre-cropped.

        Raises:
            UserError: a folder is missing or empty, the classes of the splits differ or do not
                match num_classes, the pictures do not fit in memory, or a picture is damaged.
        """
        tensors = {}
        for split, samples in self._samples(data_root).items():
            tensors[f"{split}_inputs"] = self._decode([path for path, _ in samples])
            tensors[f"{split}_targets"] = torch.tensor([label for _, label in samples])
        return tensors

    dataset = shared.image_dataset

    def _samples(self, data_root: Path) -> dict[str, Samples]:
        """Return the files of each split with their classes, in a fixed order."""
        root = data_root / self.folder
        if self.eval_fraction is not None:
            _, samples = self._classes(root)
            parts = shared.shuffled_split(
                len(samples), self.eval_fraction, seed=SPLIT_SEED, noun="pictures", place=root
            )
            return {split: [samples[i] for i in part] for split, part in parts.items()}
        present = [name for name in ("val", "eval") if (root / name).is_dir()]
        if not (root / "train").is_dir() or len(present) != 1:
            raise UserError(
                f"{root.absolute()} must hold train/CLASS/ and either val/CLASS/ or eval/CLASS/ "
                "with the pictures; name it with data_root and dataset.folder, or write "
                "dataset.eval_fraction=0.1 if it holds the folders of the classes itself"
            )
        names, train = self._classes(root / "train")
        eval_names, rest = self._classes(root / present[0])
        if differing := names ^ eval_names:
            raise UserError(
                f"the classes in {root / 'train'} and {root / present[0]} differ: "
                f"{', '.join(sorted(differing))} is in only one of them; give both the same classes"
            )
        return {"train": train, "eval": rest}

    def _classes(self, root: Path) -> tuple[set[str], Samples]:
        """Return the names of the classes, and the pictures sorted by class and path."""
        folders = [path for path in root.glob("*") if path.is_dir() and path.name[0] != "."]
        classes = {
            folder.name: sorted(one for one in folder.rglob("*") if one.suffix.lower() in SUFFIXES)
            for folder in sorted(folders)
        }
        for name, paths in classes.items():
            if not paths:
                raise UserError(
                    f"{root / name} holds no picture ({', '.join(SUFFIXES)}); add some, or remove "
                    "the folder"
                )
        if len(classes) != self.num_classes:
            raise UserError(
                f"{root.absolute()} holds {len(classes)} folders of classes, dataset.num_classes "
                f"is {self.num_classes}; "
                + (f"write dataset.num_classes={len(classes)}" if classes else "add pictures")
            )
        numbered = enumerate(classes.values())
        return set(classes), [(path, label) for label, paths in numbered for path in paths]

    def _decode(self, paths: Sequence[Path]) -> Tensor:
        shape = (len(paths), self.channels, self.height, self.width)
        needed, memory = (size / 2**30 for size in (math.prod(shape), memory_bytes()))
        if needed > memory / 2:
            raise UserError(
                f"{len(paths)} pictures of {self.height}x{self.width} pixels take {needed:.0f} GiB "
                f"and this machine has {memory:.0f}; use a smaller dataset.height and "
                "dataset.width, or fewer pictures"
            )
        images = torch.empty(shape, dtype=torch.uint8)
        with ThreadPoolExecutor() as pool:  # Pillow releases the interpreter lock
            for image, pixels in zip(images, pool.map(self._picture, paths), strict=True):
                image.copy_(pixels)
        return images

    def _picture(self, path: Path) -> Tensor:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as picture:
                if picture.mode[0] in "IF":
                    raise ValueError(f"mode {picture.mode}: more than 8 bits a channel")
                # A large photograph need not be decoded at its full size.
                picture.draft(None, (2 * max(self.width, self.height),) * 2)
                upright = ImageOps.exif_transpose(picture)
                upright = upright.convert("RGB" if self.channels == 3 else "L")
            fitted = ImageOps.fit(upright, (self.width, self.height), Image.Resampling.BILINEAR)
        except Exception as error:  # damaged bytes raise any kind
            reason = typed(error)
            raise UserError(
                f"{path.absolute()} cannot be read as a picture ({reason}); replace or remove it"
            ) from error
        pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
        return pixels.reshape(self.height, self.width, self.channels).permute(2, 0, 1)
