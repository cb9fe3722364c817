"""Writes a run's metrics and pictures: metrics.jsonl, confusion.jsonl, images/, and TensorBoard."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import json_object, json_safe, replace_file
from ddp_runner.job import Status
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.tensorboard import MOST_CLASSES, confusion_picture, header

CONFUSION_FILE = "confusion.jsonl"  # counts of each evaluation, to redraw them after a resume
# This prefix makes a separate group, the last of TensorBoard's Time Series tab.
CONFUSION_TAG = "visuals/confusion_matrix"
IMAGE_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
FLUSH_S = 5  # TensorBoard lags behind by this time; metrics.jsonl never does


class NoEvents:
    """Drops the events of a run that TensorBoard does not show."""

    def add_event(self, *arguments: object) -> None:
        """Do nothing."""

    add_summary = flush = close = add_event


class MetricFiles:
    """Writes the same numbers to metrics.jsonl and to TensorBoard. Rank 0 only.

    A resumed run continues both as if it had never stopped: lines after its checkpoint are cut, and
    `time_s` continues. With `resume_step` None the run starts at step 0. Without `has_events` no
    files for TensorBoard are written.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(
        self, run_dir: RunDir, *, resume_step: int | None = None, has_events: bool = True
    ) -> None:
        # Import late: only rank 0 needs these modules.
        from PIL import Image
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        self._run_dir, self._confusion = run_dir, run_dir.path / CONFUSION_FILE
        # Names logged at the checkpoint's step: a user's own loop may log them again.
        self._logged_at, self._logged = resume_step, set[str]()
        # Includes earlier sessions; None: not finite.
        self.last_metrics: dict[str, float | None] = {}
        first_step = 0 if resume_step is None else resume_step + 1
        with self._writing():
            lines = _cut_lines(run_dir.metrics, first_step)
            evaluations = _cut_lines(self._confusion, first_step)
            images = list(_cut_images(run_dir.images, first_step))
            self._lines = run_dir.metrics.open("a", buffering=1, encoding="utf-8")
            self._began = time.monotonic() - (lines[-1]["time_s"] if lines else 0.0)
            # TensorBoard's default loader ignores purge_step and shows everything in the files. So
            # write new files from the lines, which survive a kill.
            earlier_files = list(run_dir.path.glob("events.out.tfevents.*"))
            self._events = (
                FileWriter(str(run_dir), flush_secs=FLUSH_S) if has_events else NoEvents()
            )
            # Makes a running TensorBoard forget what it has read of this run.
            self._events.add_event(Event(session_log=SessionLog(status=SessionLog.START)), 0)
            summaries = header(run_dir)
            self._has_hparams = len(summaries) > 1
            for summary in summaries:
                self._events.add_summary(summary)
            for line in lines:
                metrics = {name: line[name] for name in line if name not in LINE_FIELDS}
                self._add(metrics, step=line["step"], time_s=line["time_s"])
                self._logged |= metrics.keys() if line["step"] == resume_step else set()
            for line in evaluations:
                self._add_confusion(line["counts"], step=line["step"], time_s=line["time_s"])
                self._logged |= {CONFUSION_FILE} if line["step"] == resume_step else set()
            for name, step, path in images:
                picture = _picture(name, np.asarray(Image.open(path)))
                self._events.add_summary(picture, step, path.stat().st_mtime)
                self._logged |= {f"image {name}"} if step == resume_step else set()
            self._events.flush()
            for path in earlier_files:
                path.unlink()

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write and flush a line of metrics.jsonl, and the same numbers to TensorBoard as float32.

        The line's `time_s` counts the seconds of the run without pauses between sessions. NaN and
        infinities become null. Skip metrics that a killed run already logged at its checkpoint.

        Raises:
            UserError: the files cannot be written, as on a full disk.
        """
        if step == self._logged_at:
            metrics = {name: metrics[name] for name in metrics if name not in self._logged}
            if not metrics:
                return
        time_s = self._time_s()
        line = {"step": step, "epoch": epoch, "time_s": time_s, **json_safe(metrics)}
        with self._writing():
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
            self._add(metrics, step=step, time_s=time_s)

    def log_confusion(self, counts: Sequence[Sequence[int]], *, step: int) -> None:
        """Write confusion counts to confusion.jsonl and draw them, up to MOST_CLASSES classes.

        The counts are (num_classes, num_classes) with one row per true class.

        Raises:
            UserError: the files cannot be written, as on a full disk.
        """
        if len(counts) > MOST_CLASSES:
            return
        if step == self._logged_at and CONFUSION_FILE in self._logged:
            return
        time_s = self._time_s()
        line = {"step": step, "time_s": time_s, "counts": counts}
        with self._writing():
            with self._confusion.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._add_confusion(counts, step=step, time_s=time_s)

    def log_image(self, name: str, pixels: NDArray[np.uint8], *, step: int) -> None:
        """Write pixels (height, width, 3) to images/NAME/step-XXXXXXXX.png and to TensorBoard.

        Raises:
            UserError: the name is not a valid path, or the files cannot be written.
        """
        if not IMAGE_NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot name a picture",
                "use letters, digits, -, _ and ., with / between names",
            )
        if step == self._logged_at and f"image {name}" in self._logged:
            return
        picture, path = _picture(name, pixels), self._run_dir.images / name / f"step-{step:08d}.png"
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, picture.value[0].image.encoded_image_string)
            self._events.add_summary(picture, step)

    def close(self, *, status: Status | None = None) -> None:
        """Close the files; TensorBoard's HParams tab shows that a run has completed."""
        from torch.utils.tensorboard.summary import hparams

        with self._writing():
            self._lines.close()
            if self._has_hparams and status == Status.COMPLETED:
                self._events.add_summary(hparams({}, {})[2])
            self._events.close()

    def _add(self, metrics: Mapping[str, float | None], *, step: int, time_s: float) -> None:
        """Add a line's numbers to TensorBoard and to `last_metrics`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.last_metrics |= json_safe(metrics)
        # A single summary takes a seventh of the time of one add_scalar per metric.
        values = [
            Summary.Value(tag=name, simple_value=math.nan if value is None else value)
            for name, value in metrics.items()
        ]
        self._events.add_summary(Summary(value=values), step, self.clock(time_s))

    def _add_confusion(self, counts: Sequence[Sequence[int]], *, step: int, time_s: float) -> None:
        picture = _picture(CONFUSION_TAG, confusion_picture(counts))
        self._events.add_summary(picture, step, self.clock(time_s))

    def _time_s(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def clock(self, time_s: float = 0.0) -> float:
        """Return the time.time() of a line's `time_s`."""
        return time.time() - (time.monotonic() - self._began - time_s)

    def _writing(self) -> AbstractContextManager[None]:
        fix = "free space or make the folder writable, then resume"
        return os_errors(f"metrics cannot be written to {self._run_dir}", fix=fix)


def _cut_lines(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Keep and return a file's lines before `first_step`; drop a line that a kill cut in half."""
    if not path.exists():
        return []
    kept, lines = [], []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = json_object(text)
        is_whole = type(line.get("step")) is int and isinstance(line.get("time_s"), int | float)
        if is_whole and line["step"] < first_step:
            kept.append(text + "\n")
            lines.append(line)
    replace_file(path, "".join(kept))
    return lines


def _cut_images(folder: Path, first_step: int) -> Iterator[tuple[str, int, Path]]:
    """Yield name, step and file of the pictures before `first_step`; delete later pictures."""
    for path in sorted(folder.glob("**/step-*.png")):
        step = int(path.stem.removeprefix("step-"))
        if step < first_step:
            yield path.parent.relative_to(folder).as_posix(), step, path
        else:
            path.unlink()


def _picture(name: str, pixels: NDArray[np.uint8]) -> Any:
    """Return pixels (height, width, 3) as a TensorBoard summary, which holds a PNG file."""
    from torch.utils.tensorboard.summary import image

    return image(name, pixels, dataformats="HWC")
