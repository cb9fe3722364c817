"""Pictures that are decoded one by one: from files, or from what a shard holds."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ddp_runner.errors import UserError, typed

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

Samples = list[tuple[str, int]]  # files and their classes


@dataclass(frozen=True)
class PictureDecoder:
    """Turns a picture into a sample: scaled and centre-cropped, or as a transform makes it."""

    channels: int  # 1: grey, 3: colours
    height: int  # pixels
    width: int
    transform: Callable[[Any], Any] | None = None  # takes a PIL picture, as torchvision's do

    def __call__(self, file: str | BinaryIO, *, name: str | None = None) -> Any:
        """Return uint8 (channels, height, width), or what the transform returns.

        The picture is upright. A transform gets it at its full size, and a PIL picture that it
        returns becomes a tensor. `name` is the picture's in messages; None: that of the file.

        Raises:
            UserError: the picture is damaged, or has more than 8 bits a channel.
        """
        from PIL import Image, ImageOps

        try:
            with Image.open(file) as picture:
                if picture.mode[0] in "IF":
                    raise ValueError(f"mode {picture.mode}: more than 8 bits a channel")
                if self.transform is None:
                    # A large photograph need not be decoded at its full size.
                    picture.draft(None, (2 * max(self.width, self.height),) * 2)
                upright = ImageOps.exif_transpose(picture)
                upright = upright.convert("RGB" if self.channels == 3 else "L")
            if self.transform is None:
                size = (self.width, self.height)
                return _pixels(ImageOps.fit(upright, size, Image.Resampling.BILINEAR))
        except Exception as error:  # damaged bytes raise any kind
            if name is None and isinstance(file, str):
                name = str(Path(file).absolute())
            raise UserError(
                f"{name} cannot be read as a picture ({typed(error)}); replace or remove it"
            ) from error
        changed = self.transform(upright)
        return _pixels(changed) if isinstance(changed, Image.Image) else changed


def _pixels(picture: Any) -> Tensor:
    """Return a PIL picture with 8 bits a channel as uint8 (channels, height, width)."""
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.reshape(picture.height, picture.width, -1).permute(2, 0, 1)


class PictureFiles:
    """Pictures in files and their classes, as a map-style dataset: a sample is (pixels, class).

    The paths are in one text. Workers share its memory with the rank that forks them; a list of a
    million paths would be copied to each worker bit by bit, as it counts references.
    """

    def __init__(self, samples: Samples, decoder: PictureDecoder) -> None:
        """Keep the files and classes of `samples`, in their order."""
        paths = [os.fsencode(path) for path, _ in samples]
        self._paths, self._decoder = b"".join(paths), decoder
        self._ends = torch.tensor([0, *map(len, paths)]).cumsum(0)
        self.targets = torch.tensor([label for _, label in samples])  # int64 (num_samples,)

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.targets)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        """Return a picture as its decoder makes it, and its class.

        Raises:
            UserError: the picture is damaged.
        """
        start, end = self._ends[index : index + 2].tolist()
        path = os.fsdecode(self._paths[start:end])
        return self._decoder(path), int(self.targets[index])
