"""What the jobs of a sweep came to: their objectives, the table, the comparison. Torch-free."""

import os
import shlex
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_runner.compare.recorded_run import best_step, is_finite
from ddp_runner.errors import UserError, nearest, printable
from ddp_runner.host.streams import shortened, wrapped
from ddp_runner.job import Outcome, Status
from ddp_runner.metric_names import headlines
from ddp_runner.sweep.jobs import failure
from ddp_runner.sweep.plan_file import PlannedJob, read_plan
from ddp_runner.tracking.alive import Standing
from ddp_runner.tracking.start_block import shown_path

COLUMNS = ("job", "status", "start", "wall", "samples/s", "metrics")
MIN_NAME = 24  # columns of a job's name


def objective_of(run_dir: Path, found: Standing, *, name: str) -> float | str | None:
    """Return a job's metric of this name, or why it has none; None if the job has not ended.

    Raises:
        UserError: the job has no such metric.
    """
    if found.has_failed:
        return found.sentence or f"{run_dir.name} has failed"
    if found.status != Status.COMPLETED:
        return None
    metrics = _numbers(found.record.get("metrics"))
    if name in metrics:
        return metrics[name]
    given = found.record.get("metrics") or {}
    if name in given:
        return f"{run_dir.name}: {name} is not a finite number"
    meant = nearest(name, given, cutoff=0.0)
    hint = f"write sweep.objective={meant}" if meant else "it has no metrics"
    raise UserError(f"sweep.objective ({name}) is not a metric of {run_dir.name}; {hint}")


def failed_jobs(folder: Path, *, among: Container[str] | None = None) -> list[Outcome]:
    """Return the outcomes of the jobs of a sweep that have failed, of all or among some ids."""
    jobs = read_plan(folder).jobs.values()
    chosen = [one for one in jobs if among is None or one.job_id in among]
    found = [(one, one.standing(folder)) for one in chosen]
    return [failure(state, folder / one.folder) for one, state in found if state.has_failed]


def sweep_table(folder: Path, *, width: int = 0) -> str:
    """Return a line for each job of a sweep, and a sentence for each that failed or was skipped.

    See ``aligned`` for the `width`.
    """
    jobs = [(one, one.standing(folder)) for one in read_plan(folder).jobs.values()]
    places = [one.absolute() for one in _places((one for one, _ in jobs), folder)] or [folder]
    rows = [COLUMNS, *(_row(*one) for one in jobs)]
    lines = ["", *aligned(rows, width=width)]
    lines += [
        wrapped(printable(f"{shown_path(Path(one.folder))}: {found.sentence}"), width)
        for one, found in jobs
        if found.sentence is not None
    ]
    common = shown_path(Path(os.path.commonpath(places)))
    tail = f"tensorboard --logdir {shlex.quote(str(common))}"
    return "\n".join([*lines, printable(tail)])


def aligned(rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Return the lines of a table whose first cells are the names of jobs.

    In `width` columns, unless it is 0, names are shortened; then the last cells are left out.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    width = width or sys.maxsize
    excess = max(0, sum(widths) + 2 * (len(widths) - 1) - width)
    names = [shortened(name, max(MIN_NAME, widths[0] - excess)) for name, *_ in rows]
    widths[0] = max(map(len, names))
    lines = []
    for name, (_, *cells) in zip(names, rows, strict=True):
        padded = [cell.ljust(size) for cell, size in zip((name, *cells), widths, strict=True)]
        line = printable("  ".join(padded).rstrip())
        if len(line) > width:
            line = f"{line[: width - 1].rpartition('  ')[0].rstrip()} …"
        lines.append(line)
    return lines


def _places(jobs: Iterable[PlannedJob], folder: Path) -> list[Path]:
    """Return where the runs of a sweep are: in its folder, or in folders of their own."""
    valid = (one.folder for one in jobs if one.fault is None)
    return list(dict.fromkeys(Path(one) if Path(one).is_absolute() else folder for one in valid))


def _row(job: PlannedJob, found: Standing) -> tuple[str, ...]:
    """Return the cells of a job; a number that its run.json lacks, or has damaged, is a dash."""
    metrics, pace = _numbers(found.record.get("metrics")), "perf/samples_per_s"
    times = _numbers(found.record)
    best = [f"(best, step {step})"] if (step := best_step(found.record)) else []
    return (
        str(shown_path(Path(job.folder))),
        found.status,
        *(f"{times[key]:.2f} s" if key in times else "-" for key in ("startup_s", "wall_s")),
        f"{metrics[pace]:.0f}" if pace in metrics else "-",
        "  ".join([*(f"{name} {metrics[name]:.4f}" for name in headlines(metrics)), *best]),
    )


def _numbers(fields: Any) -> dict[str, float]:
    """Return the fields that are numbers; empty if there is no mapping."""
    items = fields.items() if isinstance(fields, Mapping) else ()
    return {key: value for key, value in items if is_finite(value)}


def print_report(folder: Path) -> None:
    """Compare the runs of a sweep, and write the comparison into its folder's ``report``."""
    from ddp_runner.compare.__main__ import write_all
    from ddp_runner.compare.analysis import compare
    from ddp_runner.compare.formats import FORMATS
    from ddp_runner.compare.run_reader import read_runs

    jobs = read_plan(folder).jobs.values()
    completed = [one for one in jobs if one.standing(folder).status == Status.COMPLETED]
    if not completed:
        print("\nno report: no run of this sweep was completed")
        return
    places = _places(completed, folder)
    comparison = compare(read_runs(places))
    written = write_all(comparison, folder / "report", paths=places)
    print("", FORMATS["table"](comparison), *written, sep="\n", flush=True)
