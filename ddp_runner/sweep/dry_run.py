"""What ``sweep.dry_run=true`` prints: each job with its place, or why it is invalid. Torch-free."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddp_runner.config.rules import known_steps
from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import counted, printable
from ddp_runner.host.streams import wrapped
from ddp_runner.job import Job, Status
from ddp_runner.sweep.executor import Executor
from ddp_runner.sweep.ledger import Entry
from ddp_runner.tracking.start_block import shown_path

COLUMNS = ("job", "nodes", "ranks", "computes on", "steps")


def job_list(
    jobs: Mapping[str, Job],
    invalid: Sequence[Entry],
    *,
    known: Mapping[str, Entry],
    executor: Executor,
    width: int = 0,
) -> str:
    """Return a line for each job, then why the invalid ones are, then how many there are.

    Args:
        jobs: the valid jobs by their id, each with its folder.
        invalid: the others.
        known: what an earlier start of the sweep has noted of its jobs.
        executor: would run the jobs.
        width: columns of a line of text; 0: any number.
    """
    rows = [COLUMNS]
    for job_id, job in jobs.items():
        shape, config = executor.shape(job.config), job.config
        done = known.get(job_id)
        note = f"{done.status} already" if done and done.status == Status.COMPLETED else ""
        device = f"{config.backend.device}, {config.backend.name}"
        cells = (str(shape.num_nodes), str(shape.num_ranks), device, _steps(config))
        rows.append((job.title, *cells[:-1], f"{cells[-1]}  {note}"))
    words = {Status.FAILED: "invalid", Status.SKIPPED: "skipped"}
    rows += [(_name(one), "-", "-", "-", words[one.status]) for one in invalid]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["", *(_line(row, widths) for row in rows)]
    lines += [wrapped(printable(f"{_name(one)}: {one.sentence}"), width) for one in invalid]
    counts = [counted(len(jobs), "valid job"), counted(len(invalid), "invalid job")]
    return "\n".join([*lines, f"{', '.join(counts)}; nothing was started (sweep.dry_run=true)"])


def _name(entry: Entry) -> str:
    return str(shown_path(Path(entry.folder)))


def _line(row: Iterable[str], widths: Iterable[int]) -> str:
    padded = (cell.ljust(size) for cell, size in zip(row, widths, strict=True))
    return printable("  ".join(padded).rstrip())


def _steps(config: RunConfig) -> str:
    """Return the optimizer steps of a job; a dash where only the run itself will know them."""
    steps = known_steps(config) if config.task == "train" else None
    return "-" if steps is None else str(steps)
