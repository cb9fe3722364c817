"""The results of a sweep: its objective, table and comparison. Torch-free."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddp_runner.compare.recorded_run import RecordedRun, best_step, is_finite
from ddp_runner.errors import UserError, nearest, printable
from ddp_runner.host.streams import shortened, wrap_lines
from ddp_runner.job import Status
from ddp_runner.metric_names import headlines
from ddp_runner.sweep.sweep_dir import PlannedJob, read_plan
from ddp_runner.tracking.alive import Standing
from ddp_runner.tracking.start_block import shown_path

COLUMNS = ("job", "status", "start", "wall", "samples/s", "metrics")
MIN_NAME = 24  # columns of a job's name


def read_objective(run_dir: Path, standing: Standing, *, name: str) -> float | str | None:
    """Return a job's metric, or why it is missing, or None if the job has not ended.

    Raises:
        UserError: the metric's name is wrong.
    """
    if standing.has_failed:
        return standing.sentence or f"{run_dir.name} has failed"
    if standing.status != Status.COMPLETED:
        return None
    metrics = standing.record.get("metrics") or {}
    if name not in metrics:
        meant = nearest(name, metrics, cutoff=0.0)
        hint = f"write sweep.objective={meant}" if meant else "it has no metrics"
        raise UserError(f"sweep.objective ({name}) is not a metric of {run_dir.name}", hint)
    if not is_finite(metrics[name]):
        return f"{run_dir.name}: {name} is not a finite number"
    return float(metrics[name])


def sweep_table(folder: Path, *, width: int = 0) -> str:
    """Return a row for each job of a sweep, and the reasons of failures; see ``aligned``."""
    jobs = [(job, job.standing(folder)) for job in read_plan(folder).jobs.values()]
    folders = _run_folders((job for job, _ in jobs), folder) or [folder]
    rows = [COLUMNS, *(_row(job, standing) for job, standing in jobs)]
    lines = ["", *aligned(rows, width=width)]
    lines += [
        wrap_lines(printable(f"{shown_path(Path(job.folder))}: {standing.sentence}"), width)
        for job, standing in jobs
        if standing.sentence is not None
    ]
    common = shown_path(Path(os.path.commonpath([path.absolute() for path in folders])))
    return "\n".join([*lines, printable(f"tensorboard --logdir {shlex.quote(str(common))}")])


def aligned(rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Return the lines of a table; the first cell of a row is the name of a job.

    If `width` is not 0, shorten names to fit into this number of columns, then drop last cells.
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


def _run_folders(jobs: Iterable[PlannedJob], sweep: Path) -> list[Path]:
    """Return the folders that hold the runs: the sweep's, and those of resumed runs."""
    folders = (Path(job.folder) for job in jobs if job.fault is None)
    return list(dict.fromkeys(path if path.is_absolute() else sweep for path in folders))


def _row(job: PlannedJob, standing: Standing) -> tuple[str, ...]:
    """Return the cells of a job; a dash for a number that its run.json does not have."""
    run, speed = RecordedRun(Path(job.folder), standing.record), "perf/samples_per_s"
    metrics, times = run.final, [run.number(name) for name in ("startup_s", "wall_s")]
    best = [f"(best, step {step})"] if (step := best_step(standing.record)) else []
    return (
        str(shown_path(Path(job.folder))),
        standing.status,
        *("-" if time_s is None else f"{time_s:.2f} s" for time_s in times),
        f"{metrics[speed]:.0f}" if speed in metrics else "-",
        "  ".join([*(f"{name} {metrics[name]:.4f}" for name in headlines(metrics)), *best]),
    )


def print_report(folder: Path) -> None:
    """Print the comparison of a sweep's runs, and write it into the folder ``report``."""
    from ddp_runner.compare.__main__ import write_all
    from ddp_runner.compare.analysis import compare
    from ddp_runner.compare.formats import FORMATS
    from ddp_runner.compare.run_reader import read_runs

    jobs = read_plan(folder).jobs.values()
    completed = [job for job in jobs if job.standing(folder).status == Status.COMPLETED]
    if not completed:
        print("\nno report: no run of this sweep was completed")
        return
    folders = _run_folders(completed, folder)
    comparison = compare(read_runs(folders))
    paths = write_all(comparison, folder / "report", paths=folders)
    print("", FORMATS["table"](comparison), *paths, sep="\n", flush=True)
