"""What TensorBoard shows of a run beside its curves: hyperparameters, cards, charts and pictures.

All are summaries for the run's own event file. There the HParams tab finds its own, and shows the
last values of the curves with them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ddp_runner.config.identity import leaves, only_used
from ddp_runner.config.schema import has_own_loop
from ddp_runner.config.sections import OPS
from ddp_runner.files import LOADER, read_yaml
from ddp_runner.metric_names import LISTED, METRICS
from ddp_runner.tracking.run_card import run_card
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

# The keys of the config that are hyperparameters.
TUNED = re.compile(
    r"world_size|seed|backend\.name|batch\.(global_size|per_rank)"
    r"|(model|dataset|parallelism|optimizer|scheduler|train|loop)\..*"
)
# The keys of these groups that are not: they say where data are, or follow from the data.
UNTUNED = re.compile(
    r".*(_target_|_partial_|loss|folder|path|weights|pretrained|tokenizer|text|label|encoding"
    r"|requires\..*|delimiter|mean|std|num_classes|channels|log_every_steps|eval_every_(epochs|steps))"
)
# The keys that the HParams tab shows first in a run that no sweep varies.
FIRST = ("model", "dataset", "parallelism", "world_size", "optimizer.lr")
CATEGORIES = ("train", "eval", "perf", "ps")  # of the Custom Scalars tab
MOST_NUMBERED = 20  # classes of a confusion matrix up to which its cells hold numbers
MOST_CLASSES = 100  # beyond it there is no picture
PALE, DARK = (247, 251, 255), (8, 48, 107)  # colours of a cell without samples, and with all
# Pixels. A card of the Time Series tab shows 10 classes at half their size.
MARGIN, FONT_SIZE, DIGIT = 48, 18, 10


def _charts() -> dict[str, dict[str, list[str]]]:
    """Return the categories of the Custom Scalars tab, their charts and a pattern for each tag."""
    charts: dict[str, dict[str, list[str]]] = {category: {} for category in CATEGORIES}
    for metric in METRICS:
        for category, title in metric.charts:
            charts[category].setdefault(title, []).append(re.escape(metric.name))
    for title, tag in (
        ("median latency (us)", "latency_us_median"),
        ("bus bandwidth (GB/s)", "busbw_gb_per_s"),
    ):
        charts[f"collectives: {title} by bytes"] = {
            # An operation's name, its type of number if it has one, and its reduction.
            op: [f"collectives/{op}(_[a-z]+[0-9]+(_[a-z]+)?)?/{tag}"]
            for op in OPS
        }
    return charts


def header(run_dir: Path, config_text: str) -> list[Any]:
    """Return the first summaries of a run: its frozen config, its command and hyperparameters.

    Read the command and the machine from the run folder, as far as they are there.
    """
    from torch.utils.tensorboard.summary import text

    config = yaml.load(config_text, Loader=LOADER)  # a safe loader
    record = read_run_record(run_dir, missing_ok=True)
    overrides_file = RunDir(run_dir).overrides
    overrides = read_yaml(overrides_file) if overrides_file.exists() else []
    cards = [
        text("config", f"```yaml\n{config_text}\n```"),
        text("run", run_card(overrides, record)),
    ]
    # A benchmark would be a row without values among the runs of a sweep.
    task = config.get("task", "train")
    if task != "train" and not has_own_loop(task):
        return cards
    varied = {part.partition("=")[0].lstrip("+~") for part in run_dir.name.split(",")}
    if has_own_loop(task):
        config = only_used(dict(leaves(config)), uses=record.get("uses"))
    return [*cards, session_start(config, varied=varied)]


def session_start(config: Mapping[str, Any], *, varied: Collection[str]) -> Any:
    """Return the summary with a run's hyperparameters and metrics for the HParams tab.

    It names the metrics, since TensorBoard does not find them by itself if its --logdir is the
    run's own folder: the run would be shown without values. The keys that a sweep has varied are
    shown first; there a group stands for its name.
    """
    from tensorboard.plugins.hparams.api_pb2 import DataType
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    start, experiment = HParamsPluginData(), HParamsPluginData()
    start.session_start_info.SetInParent()
    found = hyperparameters(config)
    shown = [key for key in found if key.removesuffix(".name") in varied]
    shown = shown or [
        key for key in found if key.removesuffix(".name") in FIRST or key.startswith("loop.")
    ]
    for key, value in found.items():
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
    if has_own_loop(config.get("task", "train")):
        # Nobody knows its metrics yet. Without a list TensorBoard collects them from the runs.
        return _hparams_summary(session_start_info=start)
    has_classes = config.get("dataset", {}).get("num_classes") is not None
    # All of them: TensorBoard uses the list of one run for all runs that it shows.
    ordered = sorted(METRICS, key=lambda metric: metric.needs_classes and not has_classes)
    own = [f"{part}/{name}" for part in ("eval", "best") for name in config.get("metrics") or ()]
    for name in (*(metric.name for metric in ordered), *own):
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


def hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the dotted keys that a user tunes, with their values: numbers, switches and words."""
    return {
        key: value
        for key, value in leaves(config)
        if TUNED.fullmatch(key)
        and not UNTUNED.fullmatch(key)
        and isinstance(value, bool | int | float | str)
        # Paths have other characters. So do unresolved values, which may be secrets.
        and re.fullmatch(r"[\w.+-]+", str(value))
    }


def layout(tags: Collection[str]) -> Any:
    """Return the summary with the charts of the Custom Scalars tab that have one of these tags.

    A metric of the user's own has a chart of its own.
    """
    from torch.utils.tensorboard.summary import custom_scalars

    listed = _charts()
    for tag in tags:
        category, _, title = tag.partition("/")
        if category in CATEGORIES and tag not in LISTED:
            listed[category][title] = [re.escape(tag)]
    categories = {
        category: {
            # TensorBoard matches the beginning of a tag.
            chart: ["Multiline", [f"{pattern}$" for pattern in patterns]]
            for chart, patterns in charts.items()
            if any(re.fullmatch(pattern, tag) for pattern in patterns for tag in tags)
        }
        for category, charts in listed.items()
    }
    return custom_scalars({category: charts for category, charts in categories.items() if charts})


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
