"""The loggers of a task: files, TensorBoard and terminal on rank 0, nothing on other ranks."""

import sys
from collections.abc import Mapping
from typing import Self, Unpack

import numpy as np
from numpy.typing import NDArray

from ddp_runner.files import json_safe
from ddp_runner.host.machine_load import load_record, measure_load
from ddp_runner.job import Job, Status
from ddp_runner.tracking.alive import EVALUATING, Heartbeat
from ddp_runner.tracking.console import ProgressLine, end_summary
from ddp_runner.tracking.metric_files import MetricFiles
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import (
    RunFields,
    add_warning,
    end_session,
    forget_earlier_sessions,
    note_startup,
    read_run_record,
    write_run_record,
)

DIVERGED_FACTOR = 10.0  # last loss over first loss; noise stays below


class NullLogger:
    """The logger of all ranks except 0."""

    def log(self, *arguments: object, **named: object) -> None:
        """Do nothing."""

    log_image = first_loss = step_done = evaluating = exported = finish = __exit__ = log

    def __enter__(self) -> Self:
        return self


class RunLogger:
    """Writes metrics.jsonl, TensorBoard, run.json and the terminal of one run. Rank 0 only.

    The folder has a frozen config. `resume_step` is that of the checkpoint that the run resumes
    from; None: it starts at step 0. For the lengths see ``ProgressLine``; of 0 steps no progress is
    shown. `shows_curves` writes files for TensorBoard.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        job: Job,
        heartbeat: Heartbeat,
        resume_step: int | None = None,
        max_steps: int | None = 0,
        total_epochs: int = 0,
        shows_curves: bool = True,
    ) -> None:
        heartbeat.step = resume_step
        heartbeat.total_steps = max_steps or None
        heartbeat.total_epochs = total_epochs or None
        self._run_dir, self._job, self._heartbeat = run_dir, job, heartbeat
        self._is_started = False
        self._last = RunFields()  # the last confusion matrix and export, for run.json
        self._exported: dict[str, float | None] = {}  # metrics of the exported step
        self._files = MetricFiles(run_dir, resume_step=resume_step, has_events=shows_curves)
        self._progress = ProgressLine(
            max_steps,
            total_epochs=total_epochs,
            initial_step=resume_step or 0,
            stream=sys.stdout,
            title=job.title,
        )
        if resume_step is None:
            forget_earlier_sessions(run_dir)
        loaded = {"started_at": job.started_at, "resume_step": resume_step}
        write_run_record(run_dir, loaded=loaded | {"clock": self._files.clock()})
        self._load = measure_load()

    def log(
        self,
        metrics: Mapping[str, float],
        *,
        step: int,
        epoch: int,
        confusion: list[list[int]] | None = None,
    ) -> None:
        """Record metrics of a step and the confusion counts (num_classes, num_classes) if given.

        The epoch counts from 1. run.json keeps the latest counts.
        """
        self._files.log(metrics, step=step, epoch=epoch)
        self._progress.update(step, epoch=epoch, metrics=metrics)
        if confusion is not None:
            self._last["confusion_matrix"] = confusion
            self._files.log_confusion(confusion, step=step)

    def log_image(self, name: str, pixels: NDArray[np.uint8], *, step: int) -> None:
        """Write a picture (height, width, 3) to the run folder and to TensorBoard."""
        self._files.log_image(name, pixels, step=step)

    def first_loss(self, loss: float, *, has_gradient: bool) -> None:
        """Keep the first batch's loss for the end of the run; warn if every gradient is zero."""
        write_run_record(self._run_dir, first_loss=json_safe(loss))
        if not has_gradient:
            text = (
                f"all gradients of the first batch are exactly 0 (loss {loss:.4g}), so the model "
                "does not learn; check that the loss depends on the model's outputs"
            )
            self._progress.close()
            print(f"warning: {text}", flush=True)
            add_warning(self._run_dir, text)

    def step_done(self, *, step: int, epoch: int) -> None:
        """Show an optimizer step; after the first step, record the start-up time."""
        self._heartbeat.step_done(step, epoch=epoch)
        self._progress.update(step, epoch=epoch, metrics={})
        if not self._is_started:
            self._is_started = True
            note_startup(self._run_dir)

    def exported(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Keep the metrics of the exported model's step for run.json."""
        last = self._files.last_metrics
        self._exported = {name: value for name, value in metrics.items() if name in last}
        self._last["exported_step"] = step

    def evaluating(self) -> None:
        """Note the start of an evaluation, which lasts until the next step."""
        self._heartbeat.note(EVALUATING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """After an error, end the live line and close the files."""
        if error[0] is not None:
            self._progress.close()
            self._files.close(status=Status.FAILED)

    def finish(self, status: Status, /, **fields: Unpack[RunFields]) -> None:
        """Close the files, write the status and further fields to run.json, print the summary."""
        self._progress.close()
        self._files.close(status=status)
        metrics = self._files.last_metrics | json_safe(self._exported)
        ended = RunFields(status=status, metrics=metrics)
        ended["load"] = load_record(self._load, measure_load())
        end_session(self._run_dir, **(ended | self._last | fields))
        record = read_run_record(self._run_dir)
        first, last = record.get("first_loss"), self._files.last_metrics.get("train/loss")
        if status == Status.COMPLETED and first and last and last > DIVERGED_FACTOR * abs(first):
            print(
                f"warning: the run diverged: train/loss began at {first:.4g} and ended at "
                f"{last:.4g}; use a smaller optimizer.lr or train.clip_norm=1.0"
            )
        print(end_summary(self._job, self._run_dir, record), flush=True)


Logger = NullLogger | RunLogger
