"""Progress on the terminal and the summary at the end: a live line, or plain lines without one.

The live line needs no thread and never hides the cursor, so a killed rank leaves a usable terminal.
"""

import math
import re
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

from ddp_runner.host.streams import ERASE_LINE, line_width, shortened
from ddp_runner.job import Job, Status
from ddp_runner.metric_names import headlines
from ddp_runner.tracking.outputs import OUTPUTS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import shown_path

REFRESH_S = 0.1  # shortest time between redraws: drawing must not slow down training
MIN_BAR, MAX_BAR, MIN_TITLE = 6, 40, 12  # columns
LINE_WIDTH = 80  # columns of lines that do not depend on the terminal
LEAST_SHARE, LEAST_MS = 0.1, 2.0  # waiting below this share of a step, or this time, is noise
MOST_NAMED = 4  # late ranks that the summary lists


class ProgressLine:
    """Shows the progress of a run: a live line on a capable terminal, else plain lines.

    The live line has epoch, step, loss, the last evaluation and samples/s. Without it, each step
    with metrics prints a plain line. A sweep's job erases its line at the end to print its result.

    Steps and epochs are those of the whole run; 0: unknown. Steps are None in a user's own loop,
    whose metrics are all shown by name. `initial_step` was taken before this session. The title is
    that of a sweep's job, empty for a single run.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        total_epochs: int,
        initial_step: int,
        stream: TextIO,
        title: str = "",
    ) -> None:
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._initial_step, self._began = initial_step, time.monotonic()
        self._stream, self._title = stream, title
        self._step, self._epoch = initial_step, 1
        self._metrics: dict[str, float] = {}
        self._is_live = bool(total_steps and line_width(stream))
        if self._is_live:
            self._draw()

    def update(self, step: int, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Show a step. The live line keeps the last value of a metric that the step lacks."""
        if not self._is_live:
            if metrics:
                self._print(step, epoch, metrics)
            return
        self._step, self._epoch = step, epoch
        self._metrics |= metrics
        if time.monotonic() - self._drawn_at >= REFRESH_S:
            self._draw()

    def close(self) -> None:
        """End the live line; erase it for a sweep's job."""
        if not self._is_live:
            return
        if self._title:
            self._stream.write(ERASE_LINE)
        else:
            self._draw()
            self._stream.write("\n")
        self._stream.flush()

    def _print(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        if self._total_steps is None:
            start, shown = [], {name: metrics[name] for name in metrics if "perf/" not in name}
            parts = [*_named(shown), *_speed(metrics)]
        else:
            start = [_counter("epoch", epoch, self._total_epochs)]
            evaluated = {name: metrics[name] for name in _evaluated(metrics)}
            parts = _parts(metrics, evaluated=evaluated)
        if parts:
            words = [*start, _counter("step", step, self._total_steps or 0), *parts]
            print("  ".join(words), file=self._stream, flush=True)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        # Ask each time: the user may resize or close the window during the run.
        width = line_width(self._stream) or LINE_WIDTH - 1
        self._stream.write(ERASE_LINE + self._line(width)[:width])
        self._stream.flush()

    def _line(self, width: int) -> str:
        """Return the live line; drop the bar, the time left and the evaluation if too long."""
        assert self._total_steps
        title, epoch = "", _counter("epoch", self._epoch, self._total_epochs) + "  "
        step = f"step {self._step}/{self._total_steps}"
        short = {  # the first metric of an evaluation, under a short name
            name if name.endswith("loss") else name.removeprefix("eval/"): self._metrics[name]
            for name in _evaluated(self._metrics)[:1]
        }
        for evaluated in (short, {}):
            rest = "  ".join([step, *_parts(self._metrics, evaluated=evaluated)])
            room = width - len(epoch) - len(rest)
            if not self._title or room >= MIN_TITLE + 2:
                break
        if self._title:
            title = f"{_fitted(self._title, room - 2)}  "
            room -= len(title)
        time_left = self._time_left(self._total_steps)
        if time_left and room >= MIN_BAR + len(time_left) + 4:
            rest, room = f"{rest}  {time_left}", room - len(time_left) - 2
        bar = ""
        if room >= MIN_BAR + 2:
            cells = min(room - 2, MAX_BAR)
            full = min(cells, cells * self._step // self._total_steps)
            done, open_ = "━─" if "utf" in self._stream.encoding.lower() else "#."
            bar = done * full + open_ * (cells - full) + "  "
        return title + epoch + bar + rest

    def _time_left(self, total_steps: int) -> str:
        num_done, num_left = self._step - self._initial_step, total_steps - self._step
        if num_done <= 0 or num_left <= 0:
            return ""
        pace_s = (time.monotonic() - self._began) / num_done
        return f"{timedelta(seconds=round(pace_s * num_left))} left"


def end_summary(job: Job, run_dir: RunDir, record: Mapping[str, Any]) -> str:
    """Return the lines at the end of a run: status, last metrics, and how to resume and view it.

    A sweep's job gets one line with status and metrics. `record` is the run's run.json.
    """
    status, metrics = record["status"], record["metrics"]
    pairs = ((name, metrics[name]) for name in headlines(metrics))
    results = {name: math.nan if value is None else value for name, value in pairs}
    took = f"{status} in {time.time() - job.started_at:.1f} s"  # of this command
    if title := job.title:
        width, first = line_width(sys.stdout), _evaluated(results)[:1]
        for names in (["train/loss", *first], first):  # a long line drops the loss first
            shown = {name: results[name] for name in names if name in results}
            rest = "  ".join([took, *_named(shown or dict([*results.items()][:1]))])
            if not width or len(title) + 2 + len(rest) <= width:
                break
        if width:
            title = _fitted(title, width - 2 - len(rest))
        lines = [f"{title}  {rest}"]
    else:
        lines = [took]
        for part in _named(results):
            if len(lines[-1]) + 2 + len(part) <= LINE_WIDTH:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}")
        if waiting := waiting_line(record):
            lines.append(waiting)
    if status == Status.PREEMPTED and not job.title:  # a sweep's command resumes its jobs
        # Under another launcher, only its agent knows whether it restarts the run.
        other = "resume, unless its launcher restarts it, with the same command and"
        ours = "resume with: python -m ddp_runner"
        resume = run_dir.resume_words(job.resume_arguments)
        lines.append(f"{other if job.wire is None else ours} {resume}")
    if not job.title:
        folder = shown_path(run_dir.path)
        # Below this folder TensorBoard shows the run by its name.
        logdir = OUTPUTS if folder.is_relative_to(OUTPUTS) else folder.parent
        lines.append(f"tensorboard --logdir {shlex.quote(str(logdir))}")
    return "\n".join(lines)


def waiting_line(record: Mapping[str, Any]) -> str | None:
    """Return which ranks of run.json's `record` kept the others waiting, and for how long.

    None if the wait is short. Of many late ranks, list the latest in rank order: on a busy machine
    all are late at the same time or in turns.
    """
    if not (by_rank := record.get("skew_ms_by_rank")):
        return None
    step_ms = record["skew_step_ms"]
    if max(by_rank) < max(LEAST_MS, LEAST_SHARE * step_ms):
        return None
    late = [rank for rank, ms in enumerate(by_rank) if ms >= max(by_rank) / 2]
    latest = sorted(sorted(late, key=lambda rank: -by_rank[rank])[:MOST_NAMED])
    more = ["…"] if len(late) > MOST_NAMED else []
    ranks = ", ".join([*map(str, latest), *more])
    times = ", ".join([*(_ms(by_rank[rank]) for rank in latest), *more])
    late_ranks = f"rank{'s' if len(late) > 1 else ''} {ranks}"
    waiting = "each other" if len(late) == len(by_rank) else "the others"
    return f"{late_ranks} kept {waiting} waiting {times} of a step of {_ms(step_ms)}"


def _counter(name: str, count: int, total: int) -> str:
    return f"{name} {count}/{total}" if total else f"{name} {count}"


def _fitted(title: str, room: int) -> str:
    """Return a job's title, shortened to `room` but not below MIN_TITLE columns."""
    if len(title) <= room:
        return title
    return shortened(re.sub(r"^job (\d+) of (\d+): ", r"\1/\2 ", title), max(MIN_TITLE, room))


def _parts(metrics: Mapping[str, float], *, evaluated: Mapping[str, float]) -> list[str]:
    loss = [f"loss {metrics['train/loss']:.4f}"] if "train/loss" in metrics else []
    return [*loss, *_named(evaluated), *_speed(metrics)]


def _speed(metrics: Mapping[str, float]) -> list[str]:
    speed = metrics.get("perf/samples_per_s")
    return [] if speed is None else [f"{speed:.0f} samples/s"]


def _named(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in metrics.items()]


def _evaluated(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of an evaluation's headline metrics, most important first."""
    return [name for name in headlines(metrics) if name.startswith("eval/")]


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
