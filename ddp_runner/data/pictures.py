"""How ``dataset=image_folder`` reads a picture: upright, and scaled to one size."""

from typing import Any

import torch
from torch import Tensor

from ddp_runner.errors import UserError, typed


def upright(path: str, *, channels: int = 3) -> Any:
    """Return the picture in a file as PIL's, turned as its camera says; 1 channel is grey, 3 RGB.

    Raises:
        UserError: the file is damaged, or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as picture:
            if picture.mode[0] in "IF":
                raise ValueError(f"mode {picture.mode}: more than 8 bits a channel")
            return ImageOps.exif_transpose(picture).convert({1: "L", 3: "RGB"}[channels])
    except Exception as error:  # damaged bytes raise any kind
        raise UserError(
            f"{path} cannot be read as a picture ({typed(error)}); replace or remove it"
        ) from error


def fitted(picture: Any, *, height: int, width: int) -> Tensor:
    """Return a picture of PIL's, scaled and centre-cropped, as uint8 (channels, height, width)."""
    from PIL import Image, ImageOps

    found = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(found.tobytes()), dtype=torch.uint8)
    return pixels.reshape(height, width, -1).permute(2, 0, 1).contiguous()
