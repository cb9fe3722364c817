"""What TensorBoard shows besides curves: config, hyperparameters and confusion matrix."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ddp_runner.config.identity import affects_results, leaves, only_used
from ddp_runner.config.schema import has_own_loop
from ddp_runner.files import LOADER
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

# Keys, and groups of keys, that a user tunes.
TUNED = {
    *("world_size", "seed", "backend", "batch", "model", "dataset", "parallelism"),
    *("optimizer", "scheduler", "train", "loop"),
}
MOST_NUMBERED = 20  # up to this many classes, cells show numbers
MOST_CLASSES = 100  # above this many classes, no picture is drawn
PALE, DARK = (247, 251, 255), (8, 48, 107)  # cell colours: no samples, all samples of its row
# Pixels. The Time Series tab shows a picture of 10 classes at half its size.
MARGIN, FONT_SIZE, DIGIT = 48, 18, 10


def header(run_dir: RunDir) -> list[Any]:
    """Return the summaries of a run's frozen config and, for a training, its hyperparameters.

    Without a list of metrics TensorBoard collects them from the runs. A benchmark would only add an
    empty row to the HParams tab.
    """
    from torch.utils.tensorboard.summary import hparams, text

    content = run_dir.config.read_text(encoding="utf-8")
    config = yaml.load(content, Loader=LOADER)  # a safe loader
    card, task = text("config", f"```yaml\n{content}\n```"), config.get("task", "train")
    if task != "train" and not has_own_loop(task):
        return [card]
    uses = read_run_record(run_dir, missing_ok=True).get("uses")
    values = hyperparameters(only_used(dict(leaves(config)), uses=uses))
    return [card, hparams(values, {})[1]]


def hyperparameters(keys: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the dotted keys that a user tunes whose values are numbers, booleans or words."""
    return {
        key: value
        for key, value in keys.items()
        if key.partition(".")[0] in TUNED
        and affects_results(key)
        and not key.endswith(("_target_", "_partial_"))
        and isinstance(value, bool | int | float | str)
        # Excludes paths, and unresolved values, which may be secrets.
        and re.fullmatch(r"[\w.+-]+", str(value))
    }


def confusion_picture(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """Return a confusion matrix as an image (height, width, 3).

    A cell's shade is its share of the samples of the true class. Pillow draws 10 classes in 4 ms
    and 20 in 11 ms; Matplotlib took 83 and 252 ms, and 0.9 s to import. The counts are
    (num_classes, num_classes) with one row per true class.
    """
    from PIL import Image, ImageDraw, ImageFont

    matrix = np.asarray(counts, dtype=np.float64)
    num_classes = len(matrix)
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
        middle_of_cell = MARGIN + (step + 0.5) * cell
        write(middle_of_cell, size - 0.75 * MARGIN, str(step))
        write(0.75 * MARGIN, middle_of_cell, str(step))
    if num_classes <= MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(matrix):
            colour = "white" if shares[row, column, 0] > 0.5 else "black"
            x, y = MARGIN + (column + 0.5) * cell, MARGIN + (row + 0.5) * cell
            write(x, y, f"{int(count)}", colour)
    # Pillow draws horizontal text only: rotate the picture to write along its left side.
    image = image.rotate(-90)
    ImageDraw.Draw(image).text((middle, MARGIN // 3), "true class", "black", font, anchor="mm")
    return np.array(image.rotate(90))
