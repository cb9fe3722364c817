"""Runs the jobs of a sweep, whatever becomes of any of them; called by ``__main__``.

python -m ddp_runner.sweep outputs/SWEEP      # the table of a sweep, also while it runs
"""

import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_runner.comparison.run import is_finite
from ddp_runner.config import SweepSettings
from ddp_runner.errors import UserError, printable
from ddp_runner.failures import Failure
from ddp_runner.folders import InUseError, is_locked, locked
from ddp_runner.job import EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome
from ddp_runner.ledger import LEDGER, REFUSED, Entry, Ledger
from ddp_runner.record import HEADLINES, read_run_record

COLUMNS = ("job", "status", "first step", "wall", "samples/s", "metrics")
POLL_S = 0.5  # between two looks at jobs that another launcher runs


def run_jobs(
    jobs: Mapping[str, Job],
    *,
    ledger: Ledger,
    settings: SweepSettings,
    execute: Callable[[Job], Outcome],
    known_failures: Collection[str] = (),
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Run every job that is not done yet; return how each ended that was reached, in their order.

    A job that another launcher holds is left to it, and waited for. One that was interrupted goes
    on from its checkpoint, since it is run in the folder that it had.

    Args:
        jobs: by their id, each with its folder.
        ledger: of the sweep, with an entry for each job.
        settings: what to do about failures.
        execute: runs one job to its end.
        known_failures: ids of jobs that had failed before the sweep was started this time.
        stop_requested: whether to begin no other job.
    """
    outcomes = dict[str, Outcome]()
    while waiting := [job_id for job_id in jobs if job_id not in outcomes]:
        for job_id in waiting:
            entries = ledger.read()
            if stop_requested() or failed_enough(entries, settings, known_failures):
                return [outcomes[one] for one in jobs if one in outcomes]
            if entries[job_id].status in ("done", "failed"):
                outcomes[job_id] = recorded(entries[job_id], jobs[job_id].run_dir)
                break
            outcome = _take(entries[job_id], jobs[job_id], ledger, execute)
            if outcome is None:
                continue
            outcomes[job_id] = outcome
            if outcome.status == "preempted":
                return [outcomes[one] for one in jobs if one in outcomes]
            break
        else:
            time.sleep(POLL_S)
    return [outcomes[one] for one in jobs]


def failed_enough(
    entries: Mapping[str, Entry], settings: SweepSettings, known_failures: Collection[str]
) -> bool:
    """Return whether as many jobs have failed since the start as a sweep may bear, or more."""
    most = 1 if settings.fail_fast else settings.max_failures
    failed = [
        one.job_id
        for one in entries.values()
        if one.status == "failed" and one.job_id not in known_failures
    ]
    return most is not None and len(failed) >= most


def _take(
    entry: Entry, job: Job, ledger: Ledger, execute: Callable[[Job], Outcome]
) -> Outcome | None:
    """Run a job; return None where another launcher has it, or was quicker."""
    assert job.run_dir is not None
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(job.run_dir))
            if ledger.read()[entry.job_id] != entry:
                return None
            ledger.note(entry.job_id, status="running")
            outcome = execute(replace(job, started_at=time.time()))
        except InUseError:
            return None
        except (UserError, OSError) as error:  # a damaged run.json, a full disk: this job's alone
            outcome = Outcome.refused(job.run_dir, _sentence(error))
            print(f"error: {_sentence(error)}", file=sys.stderr, flush=True)
        status = {"completed": "done", "preempted": "interrupted"}.get(outcome.status, "failed")
        failure = outcome.failure
        ledger.note(
            entry.job_id,
            status=status,
            kind=failure.kind if failure else None,
            sentence=failure.sentence if failure else None,
        )
        return outcome


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}; free space or make the folder writable"
    return str(error)


def recorded(entry: Entry, run_dir: Path | None) -> Outcome:
    """Return how a job ended that an earlier start, or another launcher, has run."""
    if entry.status == "done":
        return Outcome("completed", 0, run_dir)
    failure = Failure(rank=0, kind=entry.kind or "crash", sentence=entry.sentence or "")
    exit_code = EXIT_USER_ERROR if failure.kind in ("user", REFUSED) else EXIT_FAILED
    return Outcome("failed", exit_code, run_dir, failure)


def sweep_table(folder: Path) -> str:
    """Return a line for each job of a sweep, and a sentence for each that failed or was skipped."""
    rows, failures = [COLUMNS], []
    entries = Ledger(folder).read().values()
    for entry in entries:
        run_dir = folder / entry.folder
        status = entry.status
        if status == "running" and not is_locked(run_dir):
            status = "interrupted"  # its launcher was killed
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
                _headlines(metrics, HEADLINES),
            )
        )
        if entry.sentence is not None:
            failures.append(f"{entry.folder}: {entry.sentence}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    tail = f"tensorboard --logdir {folder}"
    return "\n".join(map(printable, ["", *(line.rstrip() for line in lines), *failures, tail]))


def _record(run_dir: Path) -> dict[str, Any]:
    """Return a job's run.json; nothing of one that is not there or damaged, as its line says."""
    try:
        return read_run_record(run_dir)
    except UserError:
        return {}


def _numbers(fields: Any) -> dict[str, float]:
    """Return the numbers of a mapping that a float can hold; of anything else none."""
    items = fields.items() if isinstance(fields, dict) else ()
    return {key: value for key, value in items if is_finite(value)}


def _headlines(metrics: Mapping[str, Any], names: Collection[str]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name in names)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def main() -> None:
    """Print the table of each sweep folder that is named on the command line."""
    folders = [Path(name) for name in sys.argv[1:]]
    try:
        if not folders or any(str(folder).startswith("-") for folder in folders):
            raise UserError("write python -m ddp_runner.sweep FOLDER, the folder of a sweep")
        for folder in folders:
            if not (folder / LEDGER).is_file():
                raise UserError(f"{folder} is not the folder of a sweep: it holds no {LEDGER}")
            print(sweep_table(folder))
    except (UserError, OSError) as error:
        print(f"error: {_sentence(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
