"""A comparison for TensorBoard: a scalar for each row, the table as text, the plots as images.

TensorBoard smooths every curve, by 0.6 unless the user changes it, and no event file can change
that: of a curve with two points it would show 1.6x where 1.95x was measured. A run with a single
point keeps its value. So each row is a TensorBoard run with one point, at the row's number of
devices, and the images have the curves. A chart may still hide its highest and lowest points
("Ignore outliers in chart scaling"); the table below the chart has all of them.

The tensorboard package writes the files, without torch.
"""

import shlex
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.render.tables import as_markdown
from ddp_runner.files import safe_name

CARDS = "table and plots"  # sorts after "scaling", TensorBoard's first group
MAX_NAME = 150  # characters of a run's name; a longer one ends in the number of its row


def write_board(comparison: Comparison, folder: Path, *, pictures: Sequence[Path]) -> str:
    """Write the runs in place of those of an earlier comparison; return a line for the user.

    The `pictures` are the plots, as PNG files.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.util.tensor_util import make_tensor_proto

    for path in folder.rglob("events.out.tfevents.*"):
        path.unlink()  # TensorBoard would show its points as well
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    table = make_tensor_proto(as_markdown(comparison).encode())
    metadata = SummaryMetadata(plugin_data=plugin)
    cards = [Summary.Value(tag=f"{CARDS}/table", metadata=metadata, tensor=table)]
    for path in sorted(pictures):
        png = path.read_bytes()
        width, height = struct.unpack(">II", png[16:24])  # of its header
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        cards.append(Summary.Value(tag=f"{CARDS}/{path.stem}", image=image))
    _write(folder / CARDS, cards)
    for number, row in enumerate(comparison.rows, start=1):
        name = row.label if len(row.label) <= MAX_NAME else f"{row.label[:MAX_NAME]} {number}"
        name += f", {remark}" if (remark := row.speed_remark) else ""
        for kind, scaling in row.scalings.items():
            values = {"speedup": scaling.speedup, "efficiency": scaling.efficiency}
            if kind in row.predicted:
                values["predicted speedup"] = row.predicted[kind].speedup
            scalars = [
                Summary.Value(tag=f"scaling, {kind}/{quantity}", simple_value=value)
                for quantity, value in values.items()
            ]
            _write(folder / kind / safe_name(name), scalars, step=row.num_devices)
    return f"wrote {folder}: tensorboard --logdir {shlex.quote(str(folder))}"


def _write(folder: Path, values: Sequence[Any], *, step: int = 0) -> None:
    """Write an event file with values at one step."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    with (folder / f"events.out.tfevents.{now:.6f}").open("wb") as file:
        records = RecordWriter(file)
        for event in (
            Event(wall_time=now, file_version="brain.Event:2"),
            # Makes an open TensorBoard drop what it has read from an earlier file.
            Event(wall_time=now, session_log=SessionLog(status=SessionLog.START)),
            Event(wall_time=now, step=step, summary=Summary(value=values)),
        ):
            records.write(event.SerializeToString())
