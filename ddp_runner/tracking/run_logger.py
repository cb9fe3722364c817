"""What rank 0 tells while a run goes on: on the screen, in run.json and in the tracked metrics.

Used by ``worker``; the other ranks hold a ``NullLogger``.
"""

import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from ddp_runner.errors import UserError
from ddp_runner.files import json_safe
from ddp_runner.host.load import load_record, measure_load
from ddp_runner.job import Status
from ddp_runner.metric_names import HEADLINES
from ddp_runner.tracking.confusion import confusion_picture
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import RunFields, read_run_record, write_run_record
from ddp_runner.tracking.times import begin_anew, end_session, note_startup
from ddp_runner.tracking.tracker import Progress, Tracker

DIVERGED_FACTOR = 10.0  # a loss so many times the first one is no noise


class Logger(Protocol):
    """What the training loop logs to; only rank 0's writes anything."""

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record the metrics of a step."""

    def first_loss(self, loss: float) -> None:
        """Record the mean loss over the first global batch, before any update."""

    def step_done(self, *, step: int, epoch: int) -> None:
        """Record that an optimizer step has ended, in an epoch counted from 1."""

    def evaluated(self, confusion: list[list[int]] | None, *, step: int) -> None:
        """Record an evaluation's confusion counts (num_classes, num_classes)."""


class NullLogger:
    """The logger of every rank but 0: it does nothing."""

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Do nothing."""

    def first_loss(self, loss: float) -> None:
        """Do nothing."""

    def step_done(self, *, step: int, epoch: int) -> None:
        """Do nothing."""

    def evaluated(self, confusion: list[list[int]] | None, *, step: int) -> None:
        """Do nothing."""

    def finish(self, status: str, *, step: int, epoch: int) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class RunLogger:
    """Writes TensorBoard, metrics.jsonl, run.json and the terminal of one run. Rank 0 only."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        started_at: float,
        max_steps: int,
        total_epochs: int,
        resume_step: int | None,
    ) -> None:
        self._run_dir, self._started_at = run_dir, started_at
        self._first_step_is_done = False
        self._confusion: list[list[int]] | None = None  # of the last evaluation
        self._confusion_step = 0
        config_text = run_dir.config.read_text(encoding="utf-8")
        self._tracker = Tracker(run_dir.path, config_text=config_text, resume_step=resume_step)
        self._progress = Progress(
            max_steps,
            total_epochs=total_epochs,
            initial_step=resume_step or 0,
            stream=sys.stdout,
        )
        if resume_step is None:
            begin_anew(run_dir)
        self._load = measure_load()

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record metrics of a step and show them."""
        self._tracker.log(metrics, step=step, epoch=epoch)
        self._progress.update(step, epoch=epoch, metrics=metrics)

    def first_loss(self, loss: float) -> None:
        """Keep the first step's loss, which the last one is compared with, also after a resume."""
        write_run_record(self._run_dir, first_loss=json_safe(loss))

    def step_done(self, *, step: int, epoch: int) -> None:
        """Advance the progress bar; after the first step, record the start-up time."""
        self._progress.update(step, epoch=epoch, metrics={})
        if not self._first_step_is_done:
            self._first_step_is_done = True
            note_startup(self._run_dir)

    def evaluated(self, confusion: list[list[int]] | None, *, step: int) -> None:
        """Keep an evaluation's confusion counts, of which the last are shown at the end."""
        self._confusion, self._confusion_step = confusion, step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """After a failure, write what is left of the curves, and that it was one."""
        if error[0] is not None:
            self._tracker.close(status=Status.FAILED)

    def finish(self, status: str, *, step: int, epoch: int) -> None:
        """Close the files and write down how the run ended."""
        self._progress.close()
        matrix = self._confusion
        if matrix is not None and (picture := confusion_picture(matrix)) is not None:
            self._tracker.image("eval/confusion_matrix", picture, step=self._confusion_step)
        self._tracker.close(status=status)
        metrics = self._tracker.last_metrics
        load = load_record(self._load, measure_load())
        fields = RunFields(status=status, load=load, epoch=epoch, step=step, metrics=metrics)
        if matrix is not None:
            fields["confusion_matrix"] = matrix
        end_session(self._run_dir, **fields)
        if status == Status.COMPLETED and (warning := diverged(self._run_dir.path, metrics)):
            print(f"warning: {warning}")
        wall_s = time.time() - self._started_at  # of this session: what this command took
        print(end_summary(status, metrics, wall_s=wall_s, run_dir=self._run_dir.path), flush=True)


def keep_files(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Write a dataset's files into the run folder, so that its model can be used without the data.

    Raises:
        UserError: the run that is resumed has others, as its model was trained on other data.
    """
    for name, content in files.items():
        path = run_dir / name
        if path.exists() and path.read_bytes() != content:
            raise UserError(
                f"{path} differs from the one that the data give now, so that a checkpoint would "
                "take them for others; resume with the data as they were, or start anew"
            )
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.tmp").write_bytes(content)
            path.with_name(f".{path.name}.tmp").replace(path)


def diverged(run_dir: Path, metrics: Mapping[str, Any]) -> str | None:
    """Return a sentence if a run's loss ended far above the one of its first step."""
    first, last = read_run_record(run_dir).get("first_loss"), metrics.get("train/loss")
    if first is None or last is None or last <= DIVERGED_FACTOR * abs(first):
        return None
    return (
        f"the run diverged: train/loss began at {first:.4g} and ended at {last:.4g}; use a smaller "
        "optimizer.lr or train.clip_norm=1.0"
    )


def end_summary(status: str, metrics: Mapping[str, Any], *, wall_s: float, run_dir: Path) -> str:
    """Return how a run ended, and how to look at it."""
    results = "  ".join(
        f"{name} {value:.4f}"
        for name, value in metrics.items()
        if value is not None and name in HEADLINES
    )
    folder = shlex.quote(str(run_dir))
    lines = [f"{status} in {wall_s:.1f} s  {results}"]
    if status == Status.PREEMPTED:
        lines.append(f"go on: python -m ddp_runner {RunDir(run_dir).resume_argument}")
    lines.append(f"tensorboard --logdir {folder}")
    return "\n".join(lines)
