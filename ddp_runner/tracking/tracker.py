"""Everything that rank 0 tells about a run: TensorBoard, metrics.jsonl and progress.

worker.py gives rank 0 a `Tracker` and a `Progress`, every other rank a `NullTracker` and a
`NullProgress`; train.py calls them without asking for its rank. run.json is in record.py.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ddp_runner.errors import UserError
from ddp_runner.files import json_safe, replace_file
from ddp_runner.job import Status
from ddp_runner.metric_names import HEADLINES
from ddp_runner.tracking.run_dir import METRICS_FILE
from ddp_runner.tracking.tensorboard import header, layout, session_end

EVENT_FILES = "events.out.tfevents.*"
NO_METRICS = {"step", "epoch", "time_s"}  # the other fields of a line
ENDED = (Status.COMPLETED, Status.FAILED)
FLUSH_S = 5  # how far TensorBoard lags behind; metrics.jsonl never does


class Tracker:
    """Writes the same numbers to metrics.jsonl and to TensorBoard. Rank 0 only.

    A run that resumes goes on in both as if it had never stopped: what the killed run logged after
    its checkpoint is cut away, and `time_s` continues.

    Args:
        run_dir: The run's folder.
        config_text: The run's YAML, shown under TensorBoard's Text; its keys under HParams.
        resume_step: The step of the checkpoint that the run goes on from. None: it begins anew,
            and what an attempt before its first checkpoint logged is cut away.

    Raises:
        UserError: The folder cannot be written.
    """

    def __init__(self, run_dir: Path, *, config_text: str, resume_step: int | None = None) -> None:
        # Only rank 0 pays for this import.
        from torch.utils.tensorboard import FileWriter

        self._run_dir = run_dir
        self._last_metrics: dict[str, float | None] = {}
        with self._writing():
            run_dir.mkdir(parents=True, exist_ok=True)
            lines = self._cut_lines(0 if resume_step is None else resume_step + 1)
            self._lines = (run_dir / METRICS_FILE).open("a", buffering=1, encoding="utf-8")
            logged_s = lines[-1]["time_s"] if lines else 0.0
            self._began = time.monotonic() - logged_s
            # TensorBoard's default loader knows no purge_step: it shows what lies in the files.
            # So they are written anew from the lines, of which none is lost in a kill, either.
            earlier_files = list(run_dir.glob(EVENT_FILES))
            self._events = FileWriter(str(run_dir), flush_secs=FLUSH_S)
            self._begin_events(config_text)
            for line in lines:
                metrics = {name: line[name] for name in line if name not in NO_METRICS}
                self._add(metrics, step=line["step"], time_s=line["time_s"])
            if earlier_files:
                self._events.flush()
            for path in earlier_files:
                path.unlink()

    @property
    def last_metrics(self) -> dict[str, float | None]:
        """The last value of each metric, those before a resume included; None: not finite."""
        return dict(self._last_metrics)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Writes one line of metrics.jsonl, at once, and the same numbers to TensorBoard.

        The line also has `time_s`, seconds since the run began, without the time it lay still.
        NaN and infinities are null in the line, since JSON has no word for them. TensorBoard keeps
        float32.

        Raises:
            UserError: The files cannot be written, as on a full disk.
        """
        values = json_safe(metrics)
        time_s = round(time.monotonic() - self._began, 3)
        line = {"step": step, "epoch": epoch, "time_s": time_s, **values}
        with self._writing():
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
            self._add(metrics, step=step, time_s=time_s)

    def image(self, name: str, pixels: NDArray[np.uint8], *, step: int) -> None:
        """Writes a picture (height, width, 3) to TensorBoard.

        Raises:
            UserError: The file cannot be written, as on a full disk.
        """
        from torch.utils.tensorboard.summary import image

        with self._writing():
            self._events.add_summary(image(name, pixels, dataformats="HWC"), step)

    def close(self, *, status: str | None = None) -> None:
        """Writes what is left and closes the files.

        Args:
            status: How the run ended, for TensorBoard's HParams. One that was preempted has not.
        """
        with self._writing():
            self._lines.close()
            if status in ENDED:
                self._events.add_summary(session_end(succeeded=status == Status.COMPLETED))
            self._events.close()

    def _begin_events(self, config_text: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # A TensorBoard that is open, and does know it, forgets what it has read.
        self._events.add_event(Event(session_log=SessionLog(status=SessionLog.START)), 0)
        for summary in header(self._run_dir, config_text):
            self._events.add_summary(summary)

    def _add(self, metrics: Mapping[str, float | None], *, step: int, time_s: float) -> None:
        """Writes a line's numbers to TensorBoard, and its charts once it has new ones."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        is_new = not metrics.keys() <= self._last_metrics.keys()
        self._last_metrics |= json_safe(metrics)
        if is_new:
            self._events.add_summary(layout(self._last_metrics))
        # One summary for all: a seventh of the time that an add_scalar for each takes.
        values = [
            Summary.Value(tag=name, simple_value=math.nan if value is None else value)
            for name, value in metrics.items()
        ]
        passed_s = time.monotonic() - self._began - time_s
        self._events.add_summary(Summary(value=values), step, time.time() - passed_s)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"metrics cannot be written to {self._run_dir} ({error.strerror or error}); free "
                "space or make the folder writable, then resume"
            ) from error

    def _cut_lines(self, first_step: int) -> list[dict[str, Any]]:
        """Keeps the lines before `first_step` and returns them.

        The last line is broken where a kill came in the midst of it: it goes, too.
        """
        path = self._run_dir / METRICS_FILE
        if not path.exists():
            return []
        kept, lines = [], []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                if line["step"] >= first_step:
                    continue
                float(line["time_s"])
            except (ValueError, KeyError, TypeError):
                continue
            kept.append(text + "\n")
            lines.append(line)
        replace_file(path, "".join(kept))
        return lines


class NullTracker:
    """What the other ranks hold: the methods of `Tracker`, which do nothing."""

    last_metrics: Mapping[str, float | None] = {}

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Does nothing."""

    def close(self, *, status: str | None = None) -> None:
        """Does nothing."""


class Progress:
    """Shows how far the run is: a bar on a terminal, elsewhere a plain line. Rank 0 only.

    Args:
        total_steps: Optimizer steps of the whole run.
        total_epochs: Epochs of the whole run.
        initial_step: Steps already taken, by the run that this one resumes.
        stream: Where it is shown.
    """

    def __init__(
        self, total_steps: int, *, total_epochs: int, initial_step: int, stream: TextIO
    ) -> None:
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._stream = stream
        # tqdm's own lock is one between processes: it outlives the rank, which is then said.
        tqdm.set_lock(threading.RLock())
        self._bar = (
            tqdm(total=total_steps, initial=initial_step, file=stream, unit="step", leave=True)
            if _has_room(stream)
            else None
        )

    def update(self, step: int, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Shows a step, and its metrics if it has any; a plain line is printed only then.

        Args:
            step: Optimizer steps taken.
            epoch: The epoch in progress, counted from 1.
            metrics: What was logged at this step; loss, samples/s and eval/* are shown.
        """
        parts = [f"loss {metrics['train/loss']:.4f}"] if "train/loss" in metrics else []
        parts += [
            f"{name} {metrics[name]:.4f}"
            for name in metrics
            if name in HEADLINES and name.startswith("eval/")
        ]
        if "perf/samples_per_s" in metrics:
            parts.append(f"{metrics['perf/samples_per_s']:.0f} samples/s")
        where = f"epoch {epoch}/{self._total_epochs}"
        if self._bar is None:
            if parts:
                line = "  ".join([where, f"step {step}/{self._total_steps}", *parts])
                print(line, file=self._stream, flush=True)
            return
        self._bar.set_description_str(where, refresh=False)
        if parts:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leaves the bar as it is, and the cursor on a new line."""
        if self._bar is not None:
            self._bar.close()


def _has_room(stream: TextIO) -> bool:
    """Tell whether a bar can be drawn: a terminal without lines, as mpirun gives, shows none."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 0


class NullProgress:
    """What the other ranks hold: the methods of `Progress`, which do nothing."""

    def update(self, step: int, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
