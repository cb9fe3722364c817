"""Draws a confusion matrix for TensorBoard.

With Pillow, as every evaluation has a picture: 10 classes take 4 ms, 20 take 11 ms. Matplotlib took
83 and 252 ms, and 0.9 s to import.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_NUMBERED = 20  # classes up to which the cells hold numbers
MOST_CLASSES = 100  # beyond it there is no picture
PALE, DARK = (247, 251, 255), (8, 48, 107)  # colours of a cell without samples, and with all
# Pixels. A card of the Time Series tab shows 10 classes at half their size.
MARGIN, FONT_SIZE, DIGIT = 48, 18, 10


def confusion_picture(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8] | None:
    """Return a confusion matrix as an image (height, width, 3); None for too many classes.

    A cell's shade is its part of its row: of the samples of its true class.

    Args:
        counts: (num_classes, num_classes), a row for each true class.
    """
    from PIL import Image, ImageDraw, ImageFont

    matrix = np.asarray(counts, dtype=np.float64)
    num_classes = len(matrix)
    if num_classes > MOST_CLASSES:
        return None
    shares = (matrix / matrix.sum(axis=1, keepdims=True).clip(min=1))[..., None]
    widest = DIGIT * (len(str(int(matrix.max()))) + 1)
    cell = max(8, min(max(30, widest, 220 // num_classes), 900 // num_classes))  # pixels
    shades = ((1 - shares) * PALE + shares * DARK).round().astype(np.uint8)
    cells = shades.repeat(cell, axis=0).repeat(cell, axis=1)
    pixels = np.full((len(cells) + 2 * MARGIN, len(cells) + 2 * MARGIN, 3), 255, dtype=np.uint8)
    pixels[MARGIN:-MARGIN, MARGIN:-MARGIN] = cells

    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE)
    middle, size = image.width // 2, image.width

    def write(x: float, y: float, text: str, colour: str = "black") -> None:
        draw.text((x, y), text, fill=colour, font=font, anchor="mm")

    write(middle, MARGIN // 2, f"{int(matrix.sum()):,} samples, share of row")
    write(middle, size - MARGIN // 3, "predicted class")
    for step in range(0, num_classes, 1 if num_classes <= MOST_NUMBERED else 10):
        place = MARGIN + (step + 0.5) * cell
        write(place, size - 0.75 * MARGIN, str(step))
        write(0.75 * MARGIN, place, str(step))
    if num_classes <= MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(matrix):
            colour = "white" if shares[row, column, 0] > 0.5 else "black"
            x, y = MARGIN + (column + 0.5) * cell, MARGIN + (row + 0.5) * cell
            write(x, y, f"{int(count)}", colour)
    # Text runs upwards along the side where it is written on the picture lying on that side.
    image = image.rotate(-90)
    ImageDraw.Draw(image).text((middle, MARGIN // 3), "true class", "black", font, anchor="mm")
    return np.array(image.rotate(90))
