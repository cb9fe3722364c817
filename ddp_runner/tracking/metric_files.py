"""Writes a run's metrics and pictures: metrics.jsonl, confusion.jsonl, images/, and TensorBoard."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import json_safe, replace_file
from ddp_runner.job import Status
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.tensorboard import MOST_CLASSES, confusion_picture, header, session_end

EVENT_FILES = "events.out.tfevents.*"
CONFUSION_FILE = "confusion.jsonl"  # the counts of each evaluation, to draw them again
# A group of its own, the last one of the Time Series tab: there each run has a card for it.
CONFUSION_TAG = "visuals/confusion_matrix"
IMAGE_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
FLUSH_S = 5  # how far TensorBoard lags behind; metrics.jsonl never does


class NoEvents:
    """Takes the events of a run that TensorBoard does not show."""

    def add_event(self, *arguments: object) -> None:
        """Do nothing."""

    add_summary = flush = close = add_event


class MetricFiles:
    """Writes the same numbers to metrics.jsonl and to TensorBoard. Rank 0 only.

    A run that resumes goes on in both as if it had never stopped: what the killed run logged after
    its checkpoint is cut away, and `time_s` continues.

    Args:
        run_dir: the run's folder, with its frozen config.
        resume_step: the step of the checkpoint that the run goes on from. None: it begins anew,
            and what an attempt before its first checkpoint logged is cut away.
        has_events: whether there is anything for TensorBoard.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(
        self, run_dir: RunDir, *, resume_step: int | None = None, has_events: bool = True
    ) -> None:
        # Only rank 0 pays for these imports.
        from PIL import Image
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        self._run_dir, self._confusion = run_dir, run_dir.path / CONFUSION_FILE
        # What was logged at the checkpoint's own step: a loop may come by there once more.
        self._logged_at, self._logged = resume_step, set[str]()
        self.last_metrics: dict[str, float | None] = {}  # also before a resume; None: not finite
        first_step = 0 if resume_step is None else resume_step + 1
        with self._writing():
            lines = _cut_lines(run_dir.metrics, first_step)
            evaluations = _cut_lines(self._confusion, first_step)
            images = list(_cut_images(run_dir.images, first_step))
            self._lines = run_dir.metrics.open("a", buffering=1, encoding="utf-8")
            self._began = time.monotonic() - (lines[-1]["time_s"] if lines else 0.0)
            # TensorBoard's default loader ignores purge_step: it shows all that the files hold. So
            # they are written anew from the lines, of which a kill loses none.
            earlier_files = list(run_dir.path.glob(EVENT_FILES))
            self._events = (
                FileWriter(str(run_dir), flush_secs=FLUSH_S) if has_events else NoEvents()
            )
            # A TensorBoard that is open forgets what it has read of this run.
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
            if earlier_files:
                self._events.flush()
            for path in earlier_files:
                path.unlink()

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write one line of metrics.jsonl, at once, and the same numbers to TensorBoard.

        The line also has `time_s`, seconds since the run began, without the time between a stop and
        a resume. NaN and infinities are null in the line, since JSON does not have them.
        TensorBoard keeps float32. What a killed run logged at its checkpoint's step stays once.

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
        """Write an evaluation's confusion counts to confusion.jsonl, and their picture.

        The counts are (num_classes, num_classes), a row for each true class. Do nothing for more
        classes than a picture can show.

        Raises:
            UserError: the files cannot be written, as on a full disk.
        """
        if len(counts) > MOST_CLASSES:
            return
        if step == self._logged_at and CONFUSION_FILE in self._logged:
            return  # as in ``log``
        time_s = self._time_s()
        line = {"step": step, "time_s": time_s, "counts": counts}
        with self._writing():
            with self._confusion.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._add_confusion(counts, step=step, time_s=time_s)

    def log_image(self, name: str, pixels: NDArray[np.uint8], *, step: int) -> None:
        """Write the picture of a step as images/NAME/step-XXXXXXXX.png, and to TensorBoard.

        Args:
            name: of the picture; it may have slashes.
            pixels: (height, width, 3).
            step: optimizer steps taken.

        Raises:
            UserError: the name cannot be one of a folder, or the files cannot be written.
        """
        if not IMAGE_NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot name a picture; use letters, digits, -, _, . and / between two "
                "names"
            )
        if step == self._logged_at and f"image {name}" in self._logged:
            return
        picture, path = _picture(name, pixels), self._run_dir.images / name / f"step-{step:08d}.png"
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, picture.value[0].image.encoded_image_string)
            self._events.add_summary(picture, step)

    def close(self, *, status: str | None = None) -> None:
        """Close the files; TensorBoard's HParams show that a run has completed."""
        with self._writing():
            self._lines.close()
            if self._has_hparams and status == Status.COMPLETED:
                self._events.add_summary(session_end())
            self._events.close()

    def _add(self, metrics: Mapping[str, float | None], *, step: int, time_s: float) -> None:
        """Write a line's numbers to TensorBoard."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.last_metrics |= json_safe(metrics)
        # One summary for all: a seventh of the time that an add_scalar for each takes.
        values = [
            Summary.Value(tag=name, simple_value=math.nan if value is None else value)
            for name, value in metrics.items()
        ]
        self._events.add_summary(Summary(value=values), step, self._clock(time_s))

    def _add_confusion(self, counts: Sequence[Sequence[int]], *, step: int, time_s: float) -> None:
        picture = _picture(CONFUSION_TAG, confusion_picture(counts))
        self._events.add_summary(picture, step, self._clock(time_s))

    @property
    def clock(self) -> float:
        """The time.time() of the run's second 0: that of a line is this plus its `time_s`."""
        return self._clock(0.0)

    def _time_s(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _clock(self, time_s: float) -> float:
        """Return the time.time() of a moment given in seconds since the run began."""
        return time.time() - (time.monotonic() - self._began - time_s)

    def _writing(self) -> AbstractContextManager[None]:
        what = f"metrics cannot be written to {self._run_dir}"
        return os_errors(what, fix="free space or make the folder writable, then resume")


def _cut_lines(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Keep the lines of a file before `first_step` and return them.

    A line that a kill cut in half goes as well.
    """
    if not path.exists():
        return []
    kept, lines = [], []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            float(line["time_s"])
            if line["step"] < first_step:
                kept.append(text + "\n")
                lines.append(line)
    replace_file(path, "".join(kept))
    return lines


def _cut_images(folder: Path, first_step: int) -> Iterator[tuple[str, int, Path]]:
    """Yield the name, step and file of the pictures before `first_step`; delete the others."""
    for path in sorted(folder.glob("**/step-*.png")):
        step = int(path.stem.removeprefix("step-"))
        if step < first_step:
            yield path.parent.relative_to(folder).as_posix(), step, path
        else:
            path.unlink()


def _picture(name: str, pixels: NDArray[np.uint8]) -> Any:
    """Return pixels (height, width, 3) as a summary for TensorBoard, which holds a PNG file."""
    from torch.utils.tensorboard.summary import image

    return image(name, pixels, dataformats="HWC")
