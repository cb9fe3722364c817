"""A comparison in TensorBoard: a point over the devices for each row, the table, the plots.

Called by ``compare``. The tensorboard package alone writes them, without torch.

TensorBoard smooths every curve that it draws, by 0.6 unless told otherwise, and no event file can
change that. Of a curve of two points it would show 1.6x where 1.95x was measured. So each point is
a run of its own, which has nothing to be smoothed with; the line between them is in the plot.
"""

import shlex
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.doubts import remark
from ddp_runner.compare.render.tables import as_markdown
from ddp_runner.compare.settings import label
from ddp_runner.files import safe_name

CARDS = "table and plots"  # after the scaling in the alphabet, by which TensorBoard orders
MOST_LETTERS = 150  # of a run's name; more make way for its number


def write_board(comparison: Comparison, folder: Path, *, pictures: Sequence[Path]) -> list[str]:
    """Write the runs into a folder, in place of those of an earlier comparison; return a line.

    The step of a point is its number of devices.

    Args:
        comparison: what is shown.
        folder: for TensorBoard's --logdir.
        pictures: the plots, as PNG.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    for path in folder.rglob("events.out.tfevents.*"):
        path.unlink()  # else its points would be shown beside the new ones
    images = [_image(path) for path in pictures]
    _write(folder / CARDS, [(0, Summary(value=[_text(as_markdown(comparison)), *images]))])
    for number, row in enumerate(comparison.rows, start=1):
        name = label(row.setting, comparison.keys)
        name = name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]} {number}"
        name += f", {words}" if (words := remark(row)) else ""
        for kind, scaling in row.scalings.items():
            values = {"speedup": scaling.speedup, "efficiency": scaling.efficiency}
            if kind in row.predicted:
                values["predicted speedup"] = row.predicted[kind].speedup
            point = _scalars(f"scaling, {kind}", values)
            _write(folder / kind / safe_name(name), [(row.num_devices, point)])
    return [f"wrote {folder}: tensorboard --logdir {shlex.quote(str(folder))}"]


def _write(folder: Path, summaries: Sequence[tuple[int, Any]]) -> None:
    """Write an event file with each step's summary."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    events = [
        Event(wall_time=now, file_version="brain.Event:2"),
        # A TensorBoard that is open forgets what it has read of an earlier file.
        Event(wall_time=now, session_log=SessionLog(status=SessionLog.START)),
        *(Event(wall_time=now, step=step, summary=summary) for step, summary in summaries),
    ]
    with (folder / f"events.out.tfevents.{now:.6f}").open("wb") as file:
        records = RecordWriter(file)
        for event in events:
            records.write(event.SerializeToString())


def _scalars(group: str, values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(
        value=[
            Summary.Value(tag=f"{group}/{name}", simple_value=value)
            for name, value in values.items()
        ]
    )


def _text(markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.util.tensor_util import make_tensor_proto

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=f"{CARDS}/table",
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=make_tensor_proto(markdown.encode()),
    )


def _image(path: Path) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # a PNG's header
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
    return Summary.Value(tag=f"{CARDS}/{path.stem}", image=image)
