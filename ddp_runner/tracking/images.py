"""The pictures of a run, as PNG files: images/NAME/step-00000600.png, and in TensorBoard."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_runner.errors import UserError
from ddp_runner.files import replace_file

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)


def encoded(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels (height, width, 3) as the content of a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    return file.getvalue()


def keep_image(folder: Path, name: str, png: bytes, *, step: int) -> None:
    """Write the picture of a step; a name may have slashes.

    Raises:
        UserError: the name cannot be the name of a folder.
        OSError: the file cannot be written.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a picture; use letters, digits, -, _, . and / between two names"
        )
    path = folder / name / f"step-{step:08d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, png)


def cut_images(folder: Path, first_step: int) -> Iterator[tuple[str, int, Path]]:
    """Yield the name, step and file of the pictures before `first_step`; delete the others."""
    for path in sorted(folder.glob("**/step-*.png")):
        step = int(path.stem.removeprefix("step-"))
        if step < first_step:
            yield path.parent.relative_to(folder).as_posix(), step, path
        else:
            path.unlink()


def image_summary(name: str, png: bytes) -> Any:
    """Return a picture for TensorBoard."""
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = Image.open(io.BytesIO(png)).size
    picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=name, image=picture)])
