"""What a sweep came to: each job's objective, and the comparison of all runs. Torch-free."""

from collections.abc import Iterable
from pathlib import Path

from ddp_runner.errors import UserError, nearest
from ddp_runner.job import Status
from ddp_runner.sweep.ledger import Entry
from ddp_runner.tracking.run_record import read_run_record


def objective_of(entry: Entry, folder: Path, *, name: str | None) -> float | str | None:
    """Return the objective of a job, or why it has none.

    Args:
        entry: of the job.
        folder: of the sweep.
        name: of the metric, ``sweep.objective``; None: the sweep has no objective.

    Raises:
        UserError: the job has no such metric.
    """
    if name is None:
        return None
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


def print_report(folder: Path, entries: Iterable[Entry]) -> None:
    """Compare the runs of a sweep, and write the comparison into its folder's ``report``."""
    from ddp_runner.compare.__main__ import write_all
    from ddp_runner.compare.analysis import compare
    from ddp_runner.compare.render.tables import FORMATS
    from ddp_runner.compare.runs import read_runs

    if not any(entry.status == Status.COMPLETED for entry in entries):
        print("\nno report: no run of this sweep was completed")
        return
    comparison = compare(read_runs([folder]))
    written = write_all(comparison, folder / "report")
    print("", FORMATS["table"](comparison), *written, sep="\n", flush=True)
