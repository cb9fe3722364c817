"""What a task logs to: files, TensorBoard and the terminal on rank 0, nothing on other ranks."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Self, TypeGuard, Unpack

from ddp_runner.files import json_safe
from ddp_runner.host.load import load_record, measure_load
from ddp_runner.job import Job, Status
from ddp_runner.tracking.console import end_summary, progress
from ddp_runner.tracking.heartbeat import EVALUATING, Heartbeat
from ddp_runner.tracking.metric_files import MetricFiles
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import (
    RunFields,
    add_warning,
    begin_anew,
    end_session,
    note_startup,
    read_run_record,
    write_run_record,
)

DIVERGED_FACTOR = 10.0  # noise does not raise a loss this many times above the first one
LEAST_SHARE, LEAST_MS = 0.1, 2.0  # of a mean step; less is the noise of any machine
MOST_NAMED = 4  # ranks that the others waited for


class NullLogger:
    """The logger of every rank but 0: it does nothing."""

    def log(self, *arguments: object, **named: object) -> None:
        """Do nothing."""

    log_image = first_loss = step_done = evaluating = exported = finish = __exit__ = log

    def __enter__(self) -> Self:
        return self


class RunLogger:
    """Writes metrics.jsonl, TensorBoard, run.json and the terminal of one run. Rank 0 only.

    Args:
        run_dir: the run's folder, with its frozen config.
        job: of the session.
        started_at: time.time() when the command, or the sweep's job, began.
        resume_step: the step of the checkpoint that the run goes on from; None: it begins anew.
        max_steps: optimizer steps of the whole run; 0: show no progress; None: nobody knows.
        total_epochs: epochs of the whole run; 0: not known.
        title: what a sweep calls the job; empty for a run of its own.
        heartbeat: of the session, which shows how far the run is.
        shows_curves: whether TensorBoard shows the run.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        job: Job | None = None,
        started_at: float,
        resume_step: int | None = None,
        max_steps: int | None = 0,
        total_epochs: int = 0,
        title: str = "",
        heartbeat: Heartbeat | None = None,
        shows_curves: bool = True,
    ) -> None:
        self._heartbeat = heartbeat or Heartbeat()
        self._heartbeat.step = resume_step
        self._heartbeat.total_steps = max_steps or None
        self._heartbeat.total_epochs = total_epochs or None
        self._run_dir, self._started_at, self._title = run_dir, started_at, title
        self._is_started = False
        self._last = RunFields()  # of the last evaluation, for run.json
        self._exported: dict[str, float | None] = {}  # the metrics of that step
        self._files = MetricFiles(
            run_dir.path,
            config_text=run_dir.config.read_text(encoding="utf-8"),
            resume_step=resume_step,
            has_events=shows_curves,
        )
        self._progress = progress(
            max_steps,
            total_epochs=total_epochs,
            initial_step=resume_step or 0,
            stream=sys.stdout,
            title=title,
        )
        if resume_step is None:
            begin_anew(run_dir)
        self._job = job
        loaded = {"started_at": started_at, "resume_step": resume_step, "clock": self._files.clock}
        write_run_record(run_dir, loaded=loaded)
        self._load = measure_load()

    def log(
        self,
        metrics: Mapping[str, float],
        *,
        step: int,
        epoch: int,
        confusion: list[list[int]] | None = None,
    ) -> None:
        """Record metrics of a step, and the counts (num_classes, num_classes) of an evaluation.

        run.json keeps the last counts. The epoch counts from 1.
        """
        self._files.log(metrics, step=step, epoch=epoch)
        self._progress.update(step, epoch=epoch, metrics=metrics)
        if confusion is not None:
            self._last["confusion_matrix"] = confusion
            self._files.log_confusion(confusion, step=step)

    def log_image(self, name: str, png: bytes, *, step: int) -> None:
        """Keep a picture of a step in the run folder, and show it in TensorBoard."""
        self._files.log_image(name, png, step=step)

    def first_loss(self, loss: float, *, teaches: bool) -> None:
        """Keep the first batch's loss, to warn at the end; warn now if it `teaches` nothing."""
        write_run_record(self._run_dir, first_loss=json_safe(loss))
        if not teaches:
            text = (
                f"all gradients of the first batch are exactly 0 (loss {loss:.4g}), so nothing is "
                "learnt from it; check that the loss depends on the model's outputs"
            )
            self._progress.close()
            print(f"warning: {text}", flush=True)
            add_warning(self._run_dir, text)

    def step_done(self, *, step: int, epoch: int) -> None:
        """Show an optimizer step; after the first one record how long the start took."""
        self._heartbeat.step_done(step, epoch=epoch)
        self._progress.update(step, epoch=epoch, metrics={})
        if not self._is_started:
            self._is_started = True
            note_startup(self._run_dir)

    def exported(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Let run.json have the metrics of the step whose model is exported, where it has any."""
        last = self._files.last_metrics
        self._exported = {name: one for name, one in metrics.items() if name in last}
        self._last["exported_step"] = step

    def evaluating(self) -> None:
        """Note that an evaluation begins; it lasts until the next step."""
        self._heartbeat.note(EVALUATING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """After an error, complete the line on the terminal and mark the curves as failed."""
        if error[0] is not None:
            self._progress.close()
            self._files.close(status=Status.FAILED)

    def finish(self, status: str, /, **fields: Unpack[RunFields]) -> None:
        """Close the files, write the status and further fields into run.json, and print the end."""
        self._progress.close()
        self._files.close(status=status)
        metrics = self._files.last_metrics | json_safe(self._exported)
        ended = RunFields(status=status, metrics=metrics)
        ended["load"] = load_record(self._load, measure_load())
        end_session(self._run_dir, **(ended | self._last | fields))
        record = read_run_record(self._run_dir)
        first, last = record.get("first_loss"), self._files.last_metrics.get("train/loss")
        if (
            status == Status.COMPLETED
            and first is not None
            and last is not None
            and last > DIVERGED_FACTOR * abs(first)
        ):
            print(
                f"warning: the run diverged: train/loss began at {first:.4g} and ended at "
                f"{last:.4g}; use a smaller optimizer.lr or train.clip_norm=1.0"
            )
        wall_s = time.time() - self._started_at  # of this session: what this command took
        folder, title = self._run_dir.path, self._title
        summary = end_summary(
            status,
            metrics,
            wall_s=wall_s,
            run_dir=folder,
            title=title,
            said_again=self._job.said_again if self._job else (),
            waiting=waiting_line(record),
            is_ours=self._job is None or self._job.wire is not None,
        )
        print(summary, flush=True)


Logger = NullLogger | RunLogger


def waiting_line(record: Mapping[str, Any]) -> str | None:
    """Return which ranks kept the others waiting, and how long; None if it hardly matters.

    Ranks that are late together or in turns, as those of a busy machine are, are named in their
    order; of many only the latest.

    Args:
        record: the fields of run.json, unchecked.
    """
    by_rank, step_ms = record.get("skew_ms_by_rank"), record.get("skew_step_ms")
    if not isinstance(by_rank, list) or not by_rank or not _is_time(step_ms):
        return None
    if not all(map(_is_time, by_rank)):
        return None
    most_ms = max(by_rank)
    if most_ms < max(LEAST_MS, LEAST_SHARE * step_ms):
        return None
    of_a_step = f"of a step of {_ms(step_ms)}"
    late = {rank: ms for rank, ms in enumerate(by_rank) if ms >= most_ms / 2}
    if len(late) == 1:
        return f"rank {min(late)} kept the others waiting {_ms(most_ms)} {of_a_step}"
    latest = sorted(sorted(late, key=lambda rank: -late[rank])[:MOST_NAMED])
    more = ["…"] if len(late) > MOST_NAMED else []
    ranks = ", ".join([*map(str, latest), *more])
    times = ", ".join([*(_ms(late[rank]) for rank in latest), *more])
    whom = "each other" if len(late) == len(by_rank) else "the others"
    return f"ranks {ranks} kept {whom} waiting: {times} {of_a_step}"


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
