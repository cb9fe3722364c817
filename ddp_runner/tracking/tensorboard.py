"""What TensorBoard shows of a run beside its curves: hyperparameters, cards and a confusion matrix.

All are summaries for the run's own event file. There the HParams tab finds its own, and shows the
last values of the curves with them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ddp_runner.config.identity import counts, leaves, only_used
from ddp_runner.config.schema import has_own_loop
from ddp_runner.files import LOADER, read_yaml
from ddp_runner.metric_names import METRICS
from ddp_runner.tracking.run_card import run_card
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

# The keys, and groups of keys, that a user tunes.
TUNED = {
    *("world_size", "seed", "backend", "batch", "model", "dataset", "parallelism"),
    *("optimizer", "scheduler", "train", "loop"),
}
# The keys that the HParams tab shows first in a run that no sweep varies.
FIRST = ("model", "dataset", "parallelism", "world_size", "optimizer.lr")
MOST_NUMBERED = 20  # classes of a confusion matrix up to which its cells hold numbers
MOST_CLASSES = 100  # beyond it there is no picture
PALE, DARK = (247, 251, 255), (8, 48, 107)  # colours of a cell without samples, and with all
# Pixels. A card of the Time Series tab shows 10 classes at half their size.
MARGIN, FONT_SIZE, DIGIT = 48, 18, 10


def header(run_dir: RunDir) -> list[Any]:
    """Return the first summaries of a run: its frozen config, its command and hyperparameters."""
    from torch.utils.tensorboard.summary import text

    config_text = run_dir.config.read_text(encoding="utf-8")
    config = yaml.load(config_text, Loader=LOADER)  # a safe loader
    record = read_run_record(run_dir, missing_ok=True)
    cards = [
        text("config", f"```yaml\n{config_text}\n```"),
        text("run", run_card(read_yaml(run_dir.overrides), record)),
    ]
    # A benchmark would be a row without values among the runs of a sweep.
    task = config.get("task", "train")
    if task != "train" and not has_own_loop(task):
        return cards
    found = hyperparameters(only_used(dict(leaves(config)), uses=record.get("uses")))
    varied = {part.partition("=")[0].lstrip("+~") for part in run_dir.path.name.split(",")}
    shown = {key for key in found if key.removesuffix(".name") in varied} or {
        key for key in found if key.removesuffix(".name") in FIRST or key.startswith("loop.")
    }
    if has_own_loop(task):
        # Nobody knows its metrics yet. Without a list TensorBoard collects them from the runs.
        return [*cards, session_start(found, shown=shown)]
    has_classes = config.get("dataset", {}).get("num_classes") is not None
    # All of them: TensorBoard uses the list of one run for all runs that it shows.
    ordered = sorted(METRICS, key=lambda metric: metric.needs_classes and not has_classes)
    own = [f"{part}/{name}" for part in ("eval", "best") for name in config.get("metrics") or ()]
    metrics = [*(metric.name for metric in ordered), *own]
    return [*cards, session_start(found, shown=shown, metrics=metrics)]


def session_start(
    values: Mapping[str, bool | float | str],
    *,
    shown: Collection[str],
    metrics: Collection[str] = (),
) -> Any:
    """Return the summary with a run's hyperparameters and metrics for the HParams tab.

    TensorBoard does not find the metrics by itself if its --logdir is the run's own folder: the run
    would be shown without values.

    Args:
        values: of all hyperparameters.
        shown: those that are shown first.
        metrics: the names of all metrics; none: not known.
    """
    from tensorboard.plugins.hparams.api_pb2 import DataType
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    start, experiment = HParamsPluginData(), HParamsPluginData()
    start.session_start_info.SetInParent()
    for key, value in values.items():
        field, kind = start.session_start_info.hparams[key], "STRING"
        if isinstance(value, bool):  # before numbers: in Python a bool is an int
            field.bool_value, kind = value, "BOOL"
        elif isinstance(value, int | float):
            field.number_value, kind = value, "FLOAT64"
        else:
            field.string_value = value
        experiment.experiment.hparam_infos.add(
            name=key, type=DataType.Value(f"DATA_TYPE_{kind}"), differs=key in shown
        )
    if not metrics:
        return _hparams_summary(session_start_info=start)
    for name in metrics:
        experiment.experiment.metric_infos.add().name.tag = name
    return _hparams_summary(experiment=experiment, session_start_info=start)


def session_end(*, succeeded: bool) -> Any:
    """Return the summary with a run's end for the HParams tab."""
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData()
    status = "STATUS_SUCCESS" if succeeded else "STATUS_FAILURE"
    data.session_end_info.status = Status.Value(status)
    return _hparams_summary(session_end_info=data)


def hyperparameters(keys: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the dotted keys that a user tunes, with their values: numbers, switches and words."""
    return {
        key: value
        for key, value in keys.items()
        if key.partition(".")[0] in TUNED
        and counts(key)
        and not key.endswith(("_target_", "_partial_"))
        and isinstance(value, bool | int | float | str)
        # Paths have other characters. So do unresolved values, which may be secrets.
        and re.fullmatch(r"[\w.+-]+", str(value))
    }


def _hparams_summary(**parts: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.metadata import NULL_TENSOR, create_summary_metadata

    return Summary(
        value=[
            Summary.Value(
                tag=f"_hparams_/{name}", metadata=create_summary_metadata(data), tensor=NULL_TENSOR
            )
            for name, data in parts.items()
        ]
    )


def confusion_picture(counts: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """Return a confusion matrix as an image (height, width, 3).

    A cell's shade is its part of its row: of the samples of its true class. Pillow draws it, as
    every evaluation has a picture: 10 classes take 4 ms, 20 take 11 ms. Matplotlib took 83 and
    252 ms, and 0.9 s to import.

    Args:
        counts: (num_classes, num_classes), a row for each true class.
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
