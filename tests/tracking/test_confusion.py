"""The picture of a confusion matrix: what is dark, what is written, what is too large to draw."""

import numpy as np
import pytest

from ddp_runner.tracking.tensorboard import MARGIN, MOST_CLASSES, confusion_picture


def corner(picture: np.ndarray, row: int, column: int, num_classes: int) -> list[int]:
    """The colour just inside a cell's corner, where no number stands."""
    cell = (len(picture) - 2 * MARGIN) // num_classes
    pixel: list[int] = picture[MARGIN + row * cell + 1, MARGIN + column * cell + 1].tolist()
    return pixel


def test_a_cell_is_as_dark_as_its_part_of_the_row() -> None:
    """Classes of different sizes, of which each is right by half, look alike; none is black."""
    picture = confusion_picture([[500, 500, 0], [1, 0, 1], [0, 0, 0]])
    assert picture.dtype == np.uint8
    half, nothing = corner(picture, 0, 0, 3), corner(picture, 0, 2, 3)
    assert sum(half) < sum(nothing)
    for row, column, colour in ((0, 1, half), (1, 0, half), (1, 2, half), (2, 2, nothing)):
        assert corner(picture, row, column, 3) == colour


@pytest.mark.parametrize(("num_classes", "written"), [(2, True), (20, True), (21, False)])
def test_numbers_stand_in_the_cells_of_few_classes(num_classes: int, written: bool) -> None:
    """Ten times the counts are the same shades, so that a difference is what is written."""
    pictures = [confusion_picture((np.eye(num_classes) * n).tolist()) for n in (7, 70)]
    one, other = (picture[MARGIN:-MARGIN, MARGIN:-MARGIN] for picture in pictures)
    assert (one != other).any() == written


def test_a_hundred_classes_still_make_a_picture() -> None:
    """Beyond it a cell would be smaller than what can be seen, and none is drawn."""
    assert confusion_picture(np.eye(MOST_CLASSES).tolist()).shape == (996, 996, 3)
