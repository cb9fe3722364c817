"""Draws the status of runs and sweeps as lines of a terminal, or as JSON. Torch-free."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from ddp_runner.errors import counted, printable
from ddp_runner.files import json_safe
from ddp_runner.host.streams import wrapped
from ddp_runner.job import Status
from ddp_runner.status.find import Report, SweepStatus
from ddp_runner.status.look import LOST, RunStatus
from ddp_runner.tracking.start_block import shown_path

INDENT = " " * 4
ORDER = (Status.RUNNING, LOST, *(one for one in Status if one != Status.RUNNING))


def as_text(report: Report, *, show_all: bool, width: int) -> str:
    """Return a few lines for each run that is alive, or should be; for all of them if asked."""
    sweeps = [one for one in report.sweeps if show_all or one.is_shown or one.reason]
    runs = [one for one in report.runs if show_all or one.is_shown]
    blocks = ["\n".join(_sweep_lines(one)) for one in sweeps]
    blocks += ["\n".join(_run_lines(one)) for one in runs]
    if not report.runs and any(one.counts for one in sweeps):
        blocks.append("no run has begun")
    elif not runs:
        blocks.append("no run is here" if show_all else "no run is alive here")
    hidden = len(report.runs) - len(runs)
    if hidden:
        blocks.append(f"{counted(hidden, 'run')} ended or not started: --all shows them")
    return "\n".join(wrapped(block, width) for block in blocks)


def as_json(report: Report, *, show_all: bool) -> str:
    """Return one object: its runs and sweeps have the fields of their classes."""
    content = {
        "runs": [
            {**asdict(run), "folder": str(run.folder)}
            for run in report.runs
            if show_all or run.is_shown
        ],
        "sweeps": [
            {**asdict(sweep), "folder": str(sweep.folder)}
            for sweep in report.sweeps
            if show_all or sweep.is_shown or sweep.reason
        ],
    }
    return json.dumps(json_safe(content), indent=1)


def duration(seconds: float) -> str:
    """Return a time in its two largest units, such as 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    units = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min")]
    parts = [f"{count} {unit}" for count, unit in [*units, (whole % 60, "s")] if count]
    return " ".join(parts[:2])


def _sweep_lines(sweep: SweepStatus) -> Iterator[str]:
    yield printable(str(shown_path(sweep.folder)))
    counts = [f"{sweep.counts[one]} {one}" for one in ORDER if one in sweep.counts]
    total = counted(sum(sweep.counts.values()), "job")
    yield INDENT + printable(sweep.reason or f"sweep      {total}: {', '.join(counts)}")


def _run_lines(run: RunStatus) -> Iterator[str]:
    yield printable(str(shown_path(run.folder)))
    yield INDENT + "  ".join([f"{run.status:<9}", *_progress(run)]).rstrip()
    if place := ", ".join(_place(run)):
        yield INDENT + printable(place)
    if run.reason is not None:
        yield INDENT + printable(run.reason)


def _progress(run: RunStatus) -> Iterator[str]:
    if run.step is not None:
        yield f"step {run.step}" + (f"/{run.total_steps}" if run.total_steps else "")
    if run.epoch:
        yield f"epoch {run.epoch}" + (f"/{run.total_epochs}" if run.total_epochs else "")
    if run.samples_per_s is not None:
        yield f"{run.samples_per_s:.0f} samples/s"
    elif run.steps_per_s is not None:
        yield f"{run.steps_per_s:.3g} steps/s"
    if run.left_s is not None:
        yield f"{duration(run.left_s)} left"


def _place(run: RunStatus) -> Iterator[str]:
    hosts = ", ".join(run.hosts[:3])
    if len(run.hosts) > 3:
        hosts += f" and {len(run.hosts) - 3} more"
    ranks = counted(run.num_ranks, "rank") if run.num_ranks else ""
    if ranks or hosts:
        yield " on ".join(filter(None, [ranks, hosts]))
    if run.restarts:
        yield counted(run.restarts, "restart")
    if run.tags:
        yield f"tags: {' '.join(run.tags)}"
    if run.seen_s is not None:
        yield f"last sign of life {duration(run.seen_s)} ago"
