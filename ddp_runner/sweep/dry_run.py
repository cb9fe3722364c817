"""What ``sweep.dry_run=true`` prints: each job with its place, or why it is invalid. Torch-free."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddp_runner.config.rules import known_steps
from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import counted, printable
from ddp_runner.host.streams import line_width, wrapped
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Status
from ddp_runner.sweep.plan_file import PlannedJob, read_plan
from ddp_runner.sweep.planner import Draft, Planner
from ddp_runner.tracking.start_block import shown_path

COLUMNS = ("job", "nodes", "ranks", "computes on", "steps")


def print_jobs(planner: Planner, drafts: Sequence[Draft]) -> int:
    """Print a line for each job, then why the invalid ones are, then how many there are.

    Returns:
        The exit code: whether a job is invalid, and not skipped.
    """
    folder, width = planner.folder, line_width(sys.stdout)
    rows, known = [COLUMNS], read_plan(folder).jobs
    jobs = planner.jobs(drafts)
    for job_id, job in jobs.items():
        layout, config = planner.where.layout(job.config), job.config
        is_done = job_id in known and known[job_id].standing(folder).status == Status.COMPLETED
        note = f"{Status.COMPLETED} already" if is_done else ""
        device = f"{config.backend.device}, {config.backend.name}"
        numbers = (str(layout.num_nodes), str(layout.num_ranks))
        rows.append((job.title, *numbers, device, f"{_steps(config)}  {note}"))
    invalid = [one.planned for one in drafts if one.job is None]
    words = {True: "skipped", False: "invalid"}
    rows += [(_name(one), "-", "-", "-", words[one.is_skipped]) for one in invalid]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["", *(_line(row, widths) for row in rows)]
    lines += [wrapped(printable(f"{_name(one)}: {one.fault}"), width) for one in invalid]
    counts = [counted(len(jobs), "valid job"), counted(len(invalid), "invalid job")]
    lines.append(f"{', '.join(counts)}; nothing was started (sweep.dry_run=true)")
    if planner.is_search:
        lines.append(
            "a search chooses its later jobs by the results of these, so "
            f"{shown_path(folder)} may get others besides"
        )
    print("\n".join(lines))
    is_valid = all(one.is_skipped for one in invalid)
    return EXIT_COMPLETED if is_valid else EXIT_USER_ERROR


def _name(job: PlannedJob) -> str:
    return str(shown_path(Path(job.folder)))


def _line(row: Iterable[str], widths: Iterable[int]) -> str:
    padded = (cell.ljust(size) for cell, size in zip(row, widths, strict=True))
    return printable("  ".join(padded).rstrip())


def _steps(config: RunConfig) -> str:
    """Return the optimizer steps of a job; a dash where only the run itself will know them."""
    steps = known_steps(config) if config.task == "train" else None
    return "-" if steps is None else str(steps)
