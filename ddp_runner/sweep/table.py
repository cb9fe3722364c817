"""The table of a sweep, from its ledger and its jobs' run folders."""

import shlex
from pathlib import Path
from typing import Any

from ddp_runner.compare.run import is_finite
from ddp_runner.errors import UserError, printable
from ddp_runner.job import Status
from ddp_runner.metric_names import HEADLINES
from ddp_runner.sweep.ledger import Ledger
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.start_block import shown_path

COLUMNS = ("job", "status", "first step", "wall", "samples/s", "metrics")


def sweep_table(folder: Path) -> str:
    """Return a line for each job of a sweep, and a sentence for each that failed or was skipped."""
    rows, failures = [COLUMNS], []
    entries = Ledger(folder).read().values()
    for entry in entries:
        run_dir = folder / entry.folder
        status = entry.status
        if status == Status.RUNNING and not RunDir(run_dir).is_locked:
            status = Status.PREEMPTED  # its launcher was killed
        record = _record(run_dir)
        metrics = _numbers(record.get("metrics"))
        pace = metrics.get("perf/samples_per_s")
        rows.append(
            (
                entry.folder,
                status,
                _seconds(_numbers(record).get("startup_s")),
                _seconds(_numbers(record).get("wall_s")),
                "-" if pace is None else f"{pace:.0f}",
                "  ".join(f"{name} {metrics[name]:.4f}" for name in HEADLINES if name in metrics),
            )
        )
        if entry.sentence is not None:
            failures.append(f"{entry.folder}: {entry.sentence}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    tail = f"tensorboard --logdir {shlex.quote(str(shown_path(folder)))}"
    return "\n".join(map(printable, ["", *(line.rstrip() for line in lines), *failures, tail]))


def _record(run_dir: Path) -> dict[str, Any]:
    """Return a job's run.json; empty if it is missing or damaged."""
    try:
        return read_run_record(run_dir)
    except UserError:
        return {}


def _numbers(fields: Any) -> dict[str, float]:
    """Return the fields that are numbers; empty if there is no mapping."""
    items = fields.items() if isinstance(fields, dict) else ()
    return {key: value for key, value in items if is_finite(value)}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
