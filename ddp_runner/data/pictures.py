"""How ``dataset=image_folder`` reads a picture: upright, and scaled to one size."""

from typing import Any, cast

from torch import Tensor

from ddp_runner.errors import UserError, typed


def upright(path: str, *, channels: int = 3) -> Any:
    """Return the picture in a file as PIL's, turned as its camera says; 1 channel is grey, 3 RGB.

    Raises:
        UserError: the file is damaged, or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise UserError(f"dataset.channels ({channels}) must be 1 (grey) or 3 (colours)")
    try:
        with Image.open(path) as picture:
            if picture.mode[0] in "IF":
                raise ValueError(f"mode {picture.mode}: more than 8 bits a channel")
            return ImageOps.exif_transpose(picture).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # damaged bytes raise any kind
        raise UserError(
            f"{path} cannot be read as a picture ({typed(error)}); replace or remove it"
        ) from error


def fitted(picture: Any, *, height: int, width: int) -> Tensor:
    """Return a picture of PIL's, scaled and centre-cropped, as uint8 (channels, height, width)."""
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    found = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return cast(Tensor, pil_to_tensor(found))
