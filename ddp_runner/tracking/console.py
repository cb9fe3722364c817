"""What a user sees while a run goes on and at its end: a live line on a terminal, else plain lines.

The live line is redrawn in place, without a thread and without hiding the cursor: a rank that is
killed leaves nothing to repair.
"""

import math
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from ddp_runner.host.streams import ERASE_LINE, line_width, shortened
from ddp_runner.job import Status
from ddp_runner.metric_names import headlines
from ddp_runner.tracking.outputs import OUTPUTS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import shown_path

REFRESH_S = 0.1  # between two redraws: drawing must not slow down training
MIN_BAR, MAX_BAR, MIN_TITLE = 6, 40, 12  # columns
LINE_WIDTH = 80  # of what is printed without asking the terminal


class PlainLines:
    """Prints one line for each step that has metrics: for files, pipes and terminals of no size.

    Without `total_steps`, in a loop that the runner does not know, it prints all but the machine's
    by their names.
    """

    def __init__(self, total_steps: int | None, *, total_epochs: int, stream: TextIO) -> None:
        self._total_steps, self._total_epochs, self._stream = total_steps, total_epochs, stream

    def update(self, step: int, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Print the loss, evaluation and samples/s of a step, if it has any."""
        if self._total_steps is None:
            where, perf = [], {name: metrics[name] for name in metrics if "perf/" in name}
            parts = _named({name: metrics[name] for name in metrics if name not in perf})
            parts += _parts(perf, evaluated={})
        else:
            where, shown = [_of("epoch", epoch, self._total_epochs)], set(_evaluated(metrics))
            evaluated = {name: metrics[name] for name in metrics if name in shown}
            parts = _parts(metrics, evaluated=evaluated)
        if parts:
            where.append(_of("step", step, self._total_steps or 0))
            print("  ".join([*where, *parts]), file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: every line is complete."""


class LiveLine:
    """Shows epoch, step, loss, the last evaluation and samples/s in one line of a terminal.

    A sweep's job has a title. Its line is erased at the end, for its result to take its place.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        total_epochs: int,
        initial_step: int,
        stream: TextIO,
        title: str,
    ) -> None:
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._initial_step, self._began = initial_step, time.monotonic()
        self._stream, self._title = stream, title
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._step, self._epoch = initial_step, 1
        self._metrics: dict[str, float] = {}
        self._draw()

    def update(self, step: int, *, epoch: int, metrics: Mapping[str, float]) -> None:
        """Show a step; a metric that it lacks keeps its last value."""
        self._step, self._epoch = step, epoch
        self._metrics |= metrics
        if time.monotonic() - self._drawn_at >= REFRESH_S:
            self._draw()

    def close(self) -> None:
        """Leave the last state on a line of its own; erase the line of a sweep's job."""
        if self._title:
            self._stream.write(ERASE_LINE)
        else:
            self._draw()
            self._stream.write("\n")
        self._stream.flush()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        # Each time: a window is resized, or closed while the run goes on.
        self._console.width = width = line_width(self._stream) or LINE_WIDTH - 1
        with self._console.capture() as drawn:
            self._console.print(self._line(width), end="", no_wrap=True, overflow="ellipsis")
        self._stream.write(ERASE_LINE + drawn.get())
        self._stream.flush()

    def _line(self, width: int) -> Text:
        """Return the line: what matters first; a bar and the time left only if they fit."""
        epoch = _of("epoch", self._epoch, self._total_epochs) + "  "
        step = f"step {self._step}/{self._total_steps}"
        evaluated = _first_evaluated(self._metrics)
        rest = "  ".join([step, *_parts(self._metrics, evaluated=evaluated)])
        room = width - len(epoch) - len(rest)
        if self._title and room < MIN_TITLE + 2:
            rest = "  ".join([step, *_parts(self._metrics, evaluated={})])
            room = width - len(epoch) - len(rest)
        line = Text()
        if self._title:
            line.append(f"{_fitted(self._title, room - 2)}  ", style="bold")
            room -= len(line)
        line.append(epoch)
        left = self._time_left()
        if left and room >= MIN_BAR + len(left) + 4:
            rest, room = f"{rest}  {left}", room - len(left) - 2
        if room >= MIN_BAR + 2:
            cells = min(room - 2, MAX_BAR)
            full = min(cells, cells * self._step // self._total_steps)
            ascii_only = self._console.options.ascii_only
            line.append(("#" if ascii_only else "━") * full, style="green")
            line.append(("." if ascii_only else "─") * (cells - full) + "  ", style="dim")
        return line.append(rest)

    def _time_left(self) -> str:
        num_done = self._step - self._initial_step
        if num_done <= 0 or self._step >= self._total_steps:
            return ""
        pace_s = (time.monotonic() - self._began) / num_done
        minutes, seconds = divmod(round(pace_s * (self._total_steps - self._step)), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f"{clock} left"


def progress(
    total_steps: int | None,
    *,
    total_epochs: int,
    initial_step: int,
    stream: TextIO,
    title: str = "",
) -> LiveLine | PlainLines:
    """Return a live line if there are steps and a terminal that can draw it, else plain lines.

    Args:
        total_steps: optimizer steps of the whole run; 0: not known beforehand. None: nobody knows,
            and each line of metrics is shown with their names.
        total_epochs: epochs of the whole run; 0: not known.
        initial_step: steps taken before this session.
        stream: where the lines go.
        title: the job of a sweep.
    """
    if not total_steps or not line_width(stream):
        return PlainLines(total_steps, total_epochs=total_epochs, stream=stream)
    return LiveLine(
        total_steps,
        total_epochs=total_epochs,
        initial_step=initial_step,
        stream=stream,
        title=title,
    )


def end_summary(
    status: str,
    metrics: Mapping[str, Any],
    *,
    wall_s: float,
    run_dir: Path,
    title: str = "",
    said_again: Sequence[str] = (),
    waiting: str | None = None,
    is_ours: bool = True,
) -> str:
    """Return how a run ended, with the last metrics, and how to look at it.

    A sweep's job, which has a title, gets one line without the latter. A metric that is None was
    not finite. `wall_s` is of this command, `waiting` on the slowest rank; `said_again`: ``Job``.
    `is_ours`: our launcher started the ranks, not torchrun, srun or mpirun.
    """
    values = ((name, metrics[name]) for name in headlines(metrics))
    results = {name: math.nan if value is None else value for name, value in values}
    took = f"{status} in {wall_s:.1f} s"
    if title:
        parts = _parts(results, evaluated=_first_evaluated(results))
        parts = parts or _named(results)
        rest = "  ".join([took, *parts])
        if width := line_width(sys.stdout):
            title = _fitted(title, width - 2 - len(rest))
        lines = [f"{title}  {rest}"]
    else:
        lines = [took]
        for part in _named(results):
            if len(lines[-1]) + 2 + len(part) <= LINE_WIDTH:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}")
        lines += [waiting] if waiting else []
    if status == Status.PREEMPTED:
        words = " ".join([RunDir(run_dir).resume_argument, *map(_quoted, said_again)])
        # Only its agent knows whether a SIGTERM ends the run or comes before a restart.
        again = "unless its launcher starts it again: the same command with"
        lines.append(f"go on{': python -m ddp_runner' if is_ours else f', {again}'} {words}")
    if not title:
        folder = shown_path(run_dir)
        # The folder below which TensorBoard shows the run by its name.
        logdir = OUTPUTS if folder.is_relative_to(OUTPUTS) else folder.parent
        lines.append(f"tensorboard --logdir {shlex.quote(str(logdir))}")
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """Return a word for a shell; a list of names in double quotes, as in the docs."""
    is_list = re.fullmatch(r"\w+=\[[\w.,]*\]", word, re.ASCII)
    return f'"{word}"' if is_list else shlex.quote(word)


def _of(name: str, count: int, total: int) -> str:
    return f"{name} {count}/{total}" if total else f"{name} {count}"


def _fitted(title: str, room: int) -> str:
    """Return a job's title, shortened to the room or, if there is almost none, to MIN_TITLE."""
    if len(title) <= room:
        return title
    return shortened(re.sub(r"^job (\d+) of (\d+): ", r"\1/\2 ", title), max(MIN_TITLE, room))


def _parts(metrics: Mapping[str, float], *, evaluated: Mapping[str, float]) -> list[str]:
    parts = [f"loss {metrics['train/loss']:.4f}"] if "train/loss" in metrics else []
    parts += _named(evaluated)
    if "perf/samples_per_s" in metrics:
        parts.append(f"{metrics['perf/samples_per_s']:.0f} samples/s")
    return parts


def _named(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in metrics.items()]


def _first_evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the first headline of an evaluation, by a brief name."""
    for name in _evaluated(metrics)[:1]:
        brief = name if name.endswith("loss") else name.removeprefix("eval/")
        return {brief: metrics[name]}
    return {}


def _evaluated(metrics: Mapping[str, float]) -> list[str]:
    """Return the headlines of an evaluation, the first one first."""
    return [name for name in headlines(metrics) if name.startswith("eval/")]
