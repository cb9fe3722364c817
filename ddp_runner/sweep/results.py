"""What the jobs of a sweep came to: their objectives, the table, the comparison. Torch-free."""

import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_runner.compare.run import best_step, is_finite
from ddp_runner.errors import UserError, nearest, printable
from ddp_runner.files import is_locked
from ddp_runner.host.streams import shortened, wrapped
from ddp_runner.job import Status
from ddp_runner.metric_names import headlines
from ddp_runner.sweep.ledger import INVALID, UNFINISHED, Entry, Ledger
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.start_block import shown_path

COLUMNS = ("job", "status", "start", "wall", "samples/s", "metrics")
WATCHED = ".slurm.lock"  # of a sweep on Slurm: held by the command that watches its jobs
MIN_NAME = 24  # columns of a job's name


def _places(entries: Iterable[Entry], folder: Path) -> list[Path]:
    """Return where the runs of a sweep are: in its folder, or in folders of their own."""
    valid = (one.folder for one in entries if one.kind != INVALID)
    return list(dict.fromkeys(Path(one) if Path(one).is_absolute() else folder for one in valid))


def objective_of(entry: Entry, folder: Path, *, name: str) -> float | str:
    """Return a job's metric of this name, or why it has none.

    Raises:
        UserError: the job has no such metric.
    """
    if entry.status != Status.COMPLETED:
        return entry.sentence or f"{entry.folder} is {entry.status}"
    metrics = read_run_record(folder / entry.folder).get("metrics", {})
    if name not in metrics:
        meant = nearest(name, metrics, cutoff=0.0)
        hint = f"write sweep.objective={meant}" if meant else "it has no metrics"
        raise UserError(f"sweep.objective ({name}) is not a metric of {entry.folder}; {hint}")
    if metrics[name] is None:
        return f"{entry.folder}: {name} is not a finite number"
    return float(metrics[name])


def current(entries: Iterable[Entry], folder: Path) -> list[Entry]:
    """Return how the jobs of a sweep stand now; the ledger may not have their latest status."""
    is_on_slurm = (folder / WATCHED).exists()
    if is_on_slurm and is_locked(folder / WATCHED) is not False:  # a command watches it
        return list(entries)
    return [_current(entry, folder, is_on_slurm=is_on_slurm) for entry in entries]


def _current(entry: Entry, folder: Path, *, is_on_slurm: bool) -> Entry:
    if entry.status not in UNFINISHED:
        return entry
    run_dir = RunDir(folder / entry.folder)
    if is_on_slurm:
        entry = _by_record(entry, run_dir)
    # A job that runs and that nobody has locked: its launcher was killed.
    is_abandoned = entry.status == Status.RUNNING and run_dir.is_held is False
    return replace(entry, status=Status.PREEMPTED) if is_abandoned else entry


def _by_record(entry: Entry, run_dir: RunDir) -> Entry:
    """Return how a job on Slurm stands by its run.json; without one it waits in the queue."""
    try:
        record = read_run_record(run_dir, missing_ok=True)
    except UserError as error:
        return replace(entry, status=Status.FAILED, kind="user", sentence=str(error))
    status = record.get("status")
    if status not in set(Status):  # it has not begun
        is_guess = entry.status == Status.RUNNING
        return replace(entry, status=Status.QUEUED) if is_guess else entry
    if status == entry.status:
        return entry  # with the ledger's sentence
    failure = (record.get("error") if status == Status.FAILED else None) or {}
    return replace(
        entry,
        status=Status(status),
        kind=failure.get("kind"),
        sentence=failure.get("sentence"),
    )


def sweep_table(folder: Path, *, width: int = 0) -> str:
    """Return a line for each job of a sweep, and a sentence for each that failed or was skipped.

    In `width` columns, unless it is 0, names are shortened; then the last cells are left out.
    """
    entries = current(Ledger(folder).read().values(), folder)
    places = [one.absolute() for one in _places(entries, folder)] or [folder]
    rows = [COLUMNS, *(_row(folder, entry) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    width = width or sys.maxsize
    excess = max(0, sum(widths) + 2 * (len(widths) - 1) - width)
    names = [shortened(name, max(MIN_NAME, widths[0] - excess)) for name, *_ in rows]
    widths[0] = max(map(len, names))
    lines = [""]
    for name, (_, *cells) in zip(names, rows, strict=True):
        padded = [cell.ljust(size) for cell, size in zip((name, *cells), widths, strict=True)]
        line = printable("  ".join(padded).rstrip())
        if len(line) > width:
            line = f"{line[: width - 1].rpartition('  ')[0].rstrip()} …"
        lines.append(line)
    lines += [
        wrapped(printable(f"{shown_path(Path(entry.folder))}: {entry.sentence}"), width)
        for entry in entries
        if entry.sentence is not None
    ]
    common = shown_path(Path(os.path.commonpath(places)))
    tail = f"tensorboard --logdir {shlex.quote(str(common))}"
    return "\n".join([*lines, printable(tail)])


def _row(folder: Path, entry: Entry) -> tuple[str, ...]:
    """Return the cells of a job; a number that its run.json lacks, or has damaged, is a dash."""
    try:
        record = read_run_record(folder / entry.folder)
    except UserError:
        record = {}
    metrics, pace = _numbers(record.get("metrics")), "perf/samples_per_s"
    times = _numbers(record)
    best = [f"(best, step {step})"] if (step := best_step(record)) else []
    return (
        str(shown_path(Path(entry.folder))),
        entry.status,
        *(f"{times[key]:.2f} s" if key in times else "-" for key in ("startup_s", "wall_s")),
        f"{metrics[pace]:.0f}" if pace in metrics else "-",
        "  ".join([*(f"{name} {metrics[name]:.4f}" for name in headlines(metrics)), *best]),
    )


def _numbers(fields: Any) -> dict[str, float]:
    """Return the fields that are numbers; empty if there is no mapping."""
    items = fields.items() if isinstance(fields, dict) else ()
    return {key: value for key, value in items if is_finite(value)}


def print_report(folder: Path, entries: Iterable[Entry]) -> None:
    """Compare the runs of a sweep, and write the comparison into its folder's ``report``."""
    from ddp_runner.compare.__main__ import write_all
    from ddp_runner.compare.analysis import compare
    from ddp_runner.compare.formats import FORMATS
    from ddp_runner.compare.runs import read_runs

    completed = [entry for entry in entries if entry.status == Status.COMPLETED]
    if not completed:
        print("\nno report: no run of this sweep was completed")
        return
    places = _places(completed, folder)
    comparison = compare(read_runs(places))
    written = write_all(comparison, folder / "report", paths=places)
    print("", FORMATS["table"](comparison), *written, sep="\n", flush=True)
