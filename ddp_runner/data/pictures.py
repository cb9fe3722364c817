"""Reads the pictures of ``dataset=image_folder`` at a fixed size, and augments images."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_runner.errors import UserError, any_error

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def upright(path: str, *, channels: int = 3) -> "Picture":
    """Return a file's picture as a PIL image, rotated by its EXIF tag; 1 channel is grey, 3 RGB.

    Raises:
        UserError: the file is damaged, or has more than 8 bits per channel.
    """
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise UserError(f"dataset.channels ({channels}) must be 1 (grey) or 3 (colours)")
    with (
        any_error(f"{path} cannot be read as a picture", "replace or remove it"),
        Image.open(path) as picture,
    ):
        if picture.mode[0] in "IF":
            raise ValueError(f"mode {picture.mode}: more than 8 bits per channel")
        return ImageOps.exif_transpose(picture).convert("L" if channels == 1 else "RGB")


def fitted(picture: "Picture", *, height: int, width: int) -> Tensor:
    """Return a PIL image, scaled and centre-cropped, as uint8 (channels, height, width)."""
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    cropped = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return cast(Tensor, pil_to_tensor(cropped))


@dataclass(frozen=True)
class FlipAndCrop:
    """Mirror half of the images, and shift each by up to ``crop_padding`` pixels along both axes.

    A shift crops the image with a border of zeros, the mean colour after normalisation. Residual
    networks are trained this way on CIFAR-10 (arXiv:1512.03385, section 4.2: padding of 4, flips).
    """

    horizontal_flip: bool
    crop_padding: int  # pixels on each side; 0: no shift

    def __post_init__(self) -> None:
        if not isinstance(self.horizontal_flip, bool) or self.crop_padding < 0:
            raise UserError(
                f"dataset.augmentation.crop_padding ({self.crop_padding}) must be 0 or greater, "
                f"and horizontal_flip ({self.horizontal_flip}) true or false"
            )

    @property
    def num_randoms(self) -> int:
        """Return 1 for the flip plus 2 for the shift."""
        return int(self.horizontal_flip) + 2 * int(self.crop_padding > 0)

    def __call__(self, inputs: Tensor, randoms: Tensor) -> Tensor:
        """Return the changed images (batch, channels, height, width), in any memory format.

        The first of `randoms` (batch, num_randoms) flips if below 0.5. The next are the shifts of
        rows and of columns; 0.5 means no shift.
        """
        padding = self.crop_padding
        height, width = inputs.shape[-2:]
        rows = torch.arange(height, device=inputs.device).expand(len(inputs), height)
        columns = torch.arange(width, device=inputs.device).expand(len(inputs), width)
        if self.horizontal_flip:
            columns = torch.where(randoms[:, :1] < 0.5, columns.flip(1), columns)
        if padding:
            shifts = (randoms[:, -2:] * (2 * padding + 1)).long()
            rows, columns = rows + shifts[:, :1], columns + shifts[:, 1:]
            inputs = pad(inputs, (padding,) * 4)
        # Each pixel's index in the flattened padded image: one gather is three times as fast as
        # indexing by rows and columns.
        indices = rows.unsqueeze(2) * inputs.shape[-1] + columns.unsqueeze(1)
        indices = indices.flatten(1).unsqueeze(1).expand(-1, inputs.shape[1], -1)
        return inputs.flatten(2).gather(2, indices).view(*inputs.shape[:2], height, width)
