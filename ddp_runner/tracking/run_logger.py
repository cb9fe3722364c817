"""What a task logs to: files, TensorBoard and the terminal on rank 0, nothing on other ranks."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from ddp_runner.errors import UserError
from ddp_runner.files import json_safe
from ddp_runner.host.load import load_record, measure_load
from ddp_runner.job import Status
from ddp_runner.tracking.console import PlainLines, end_summary, progress
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import RunFields, read_run_record, write_run_record
from ddp_runner.tracking.times import begin_anew, end_session, note_startup
from ddp_runner.tracking.tracker import Tracker

DIVERGED_FACTOR = 10.0  # noise does not raise a loss this many times above the first one


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

    def finish(
        self, status: str, *, step: int, epoch: int, fields: RunFields | None = None
    ) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class RunLogger:
    """Writes metrics.jsonl, TensorBoard, run.json and the terminal of one run. Rank 0 only.

    Args:
        run_dir: the run's folder, with its frozen config.
        started_at: time.time() when the command, or the sweep's job, began.
        resume_step: the step of the checkpoint that the run goes on from; None: it begins anew.
        max_steps: optimizer steps of the whole run; None: show no progress.
        total_epochs: epochs of the whole run.
        title: what a sweep calls the job; empty for a run of its own.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        started_at: float,
        resume_step: int | None = None,
        max_steps: int | None = None,
        total_epochs: int = 0,
        title: str = "",
    ) -> None:
        self._run_dir, self._started_at, self._title = run_dir, started_at, title
        self._is_started = False
        self._last = RunFields()  # of the last evaluation, for run.json
        config_text = run_dir.config.read_text(encoding="utf-8")
        self._tracker = Tracker(run_dir.path, config_text=config_text, resume_step=resume_step)
        self._progress = (
            PlainLines(0, total_epochs=0, stream=sys.stdout)
            if max_steps is None
            else progress(
                max_steps,
                total_epochs=total_epochs,
                initial_step=resume_step or 0,
                stream=sys.stdout,
                title=title,
            )
        )
        if resume_step is None:
            begin_anew(run_dir)
        self._load = measure_load()

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record metrics of a step and show them."""
        self._tracker.log(metrics, step=step, epoch=epoch)
        self._progress.update(step, epoch=epoch, metrics=metrics)

    def first_loss(self, loss: float) -> None:
        """Keep the first step's loss in run.json: the last one is compared with it at the end."""
        write_run_record(self._run_dir, first_loss=json_safe(loss))

    def step_done(self, *, step: int, epoch: int) -> None:
        """Show the step; after the first one record how long the start took."""
        self._progress.update(step, epoch=epoch, metrics={})
        if not self._is_started:
            self._is_started = True
            note_startup(self._run_dir)

    def evaluated(self, confusion: list[list[int]] | None, *, step: int) -> None:
        """Draw an evaluation's confusion counts for TensorBoard, and keep the last for run.json."""
        if confusion is not None:
            self._last["confusion_matrix"] = confusion
            self._tracker.log_confusion(confusion, step=step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """After an error, complete the line on the terminal and mark the curves as failed."""
        if error[0] is not None:
            self._progress.close()
            self._tracker.close(status=Status.FAILED)

    def finish(
        self, status: str, *, step: int, epoch: int, fields: RunFields | None = None
    ) -> None:
        """Close the files, record how the run ended, and print it.

        Args:
            status: how the run ended.
            step: optimizer steps taken.
            epoch: epochs that have ended.
            fields: further fields of run.json.
        """
        self._progress.close()
        self._tracker.close(status=status)
        metrics = self._tracker.last_metrics
        ended = RunFields(status=status, epoch=epoch, step=step, metrics=metrics)
        ended["load"] = load_record(self._load, measure_load())
        end_session(self._run_dir, **(ended | self._last | (fields or RunFields())))
        wall_s = time.time() - self._started_at  # of this session: what this command took
        summary = end_summary(
            status, metrics, wall_s=wall_s, run_dir=self._run_dir.path, title=self._title
        )
        if status == Status.COMPLETED and (warning := diverged(self._run_dir.path, metrics)):
            print(f"warning: {warning}")
        print(summary, flush=True)


def keep_files(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Write a dataset's files into the run folder, so that its model can be used without the data.

    Raises:
        UserError: the run folder has other files, so the model was trained on other data.
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
    """Return a warning if a run's loss ended far above that of its first step."""
    first, last = read_run_record(run_dir).get("first_loss"), metrics.get("train/loss")
    if first is None or last is None or last <= DIVERGED_FACTOR * abs(first):
        return None
    return (
        f"the run diverged: train/loss began at {first:.4g} and ended at {last:.4g}; use a smaller "
        "optimizer.lr or train.clip_norm=1.0"
    )
