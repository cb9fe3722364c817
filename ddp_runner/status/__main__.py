"""The command ``python -m ddp_runner.status``: which runs are alive, and how far they are.

python -m ddp_runner.status
python -m ddp_runner.status outputs/SWEEP --all
python -m ddp_runner.status --watch
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_runner.errors import UserError, counted, exit_with, printable
from ddp_runner.files import json_safe
from ddp_runner.host.streams import line_width, wrapped
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Status
from ddp_runner.status.find import Report, SweepStatus, survey
from ddp_runner.status.look import RunStatus
from ddp_runner.tracking.alive import LOST
from ddp_runner.tracking.outputs import OUTPUTS
from ddp_runner.tracking.start_block import shown_path

WATCH_S = 2.0
WIDTH = 80  # of what is printed without a terminal
INDENT = " " * 4
ORDER = (Status.RUNNING, LOST, *(one for one in Status if one != Status.RUNNING))


def main() -> None:
    """Run the command and exit."""
    exit_with(run)


def run(arguments: Sequence[str]) -> int:
    """Print the status of the runs that a command line names.

    Returns:
        The exit code: 0, or 1 if a run is lost or silent.

    Raises:
        UserError: a path does not exist, or the options exclude each other.
    """
    args = _parser().parse_args(arguments)
    if args.watch and args.json:
        raise UserError("--watch redraws a terminal and --json is for programs; give one of them")
    if args.watch and line_width(sys.stdout):
        return _watch(args.paths, show_all=args.all)
    report = survey(args.paths)
    if args.json:
        text = as_json(report, show_all=args.all)
    else:
        text = as_text(report, show_all=args.all, width=line_width(sys.stdout) or WIDTH)
    print(text, flush=True)
    return EXIT_FAILED if report.num_missing else EXIT_COMPLETED


def _watch(paths: Sequence[Path], *, show_all: bool) -> int:
    """Redraw the status every two seconds until Ctrl-C; return the exit code of the last look."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    report = survey(paths)
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                text = as_text(report, show_all=show_all, width=line_width(sys.stdout) or WIDTH)
                live.update(Text(f"{time.strftime('%H:%M:%S')}\n{text}"), refresh=True)
                time.sleep(WATCH_S)
                report = survey(paths)
    except KeyboardInterrupt:
        return EXIT_FAILED if report.num_missing else EXIT_COMPLETED


def as_text(report: Report, *, show_all: bool, width: int) -> str:
    """Return a few lines for each run that is alive, or should be; for all of them if asked."""
    runs, sweeps = report.shown(show_all=show_all)
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
    runs, sweeps = report.shown(show_all=show_all)
    content = {
        name: [{**asdict(one), "folder": str(one.folder)} for one in found]
        for name, found in (("runs", runs), ("sweeps", sweeps))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.status",
        description="Show which runs are alive, with their step and speed, and which have died "
        "without ending.",
        epilog="Exit code: 0; 1 if a run is lost (no process runs it) or silent (its process gives "
        "no sign); 2 for a mistake in the command.",
    )
    add = parser.add_argument
    help_paths = "a run, a sweep, or all outputs (default: outputs)"
    add("paths", nargs="*", type=Path, default=[OUTPUTS], metavar="PATH", help=help_paths)
    add("--all", action="store_true", help="show every run, also those that have ended")
    add("--watch", action="store_true", help="redraw it every 2 s until Ctrl-C, on a terminal")
    add("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    main()
