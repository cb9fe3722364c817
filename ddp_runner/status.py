"""The command ``python -m ddp_runner.status``: which runs are alive, and how far they are.

python -m ddp_runner.status
python -m ddp_runner.status outputs/SWEEP --all
watch python -m ddp_runner.status
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_runner.errors import counted, duration, exit_with, listed, printable
from ddp_runner.files import json_safe
from ddp_runner.host.streams import line_width, wrap_lines
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Status
from ddp_runner.sweep.survey import RunStatus, SweepStatus, survey
from ddp_runner.tracking.alive import LOST
from ddp_runner.tracking.outputs import OUTPUTS
from ddp_runner.tracking.start_block import shown_path

WIDTH = 80  # columns, without a terminal
INDENT = " " * 4
ORDER = (Status.RUNNING, LOST, *(status for status in Status if status != Status.RUNNING))


def main() -> None:
    """Run the command and exit."""
    exit_with(run)


def run(arguments: Sequence[str]) -> int:
    """Print the status of the runs; return the exit code: 1 if a run is lost or silent."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.status",
        description="Show which runs are alive, with their step and speed, and which were killed.",
        epilog="Exit code: 0; 1 if a run is lost (no process runs it) or silent (its process gives "
        "no sign of life); 2 for a mistake in the command.",
    )
    add = parser.add_argument
    help_paths = "a run, a sweep, or all outputs (default: outputs)"
    add("paths", nargs="*", type=Path, default=[OUTPUTS], metavar="PATH", help=help_paths)
    add("--all", action="store_true", help="show ended runs, too")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    runs, sweeps = survey(args.paths)
    shown = [run for run in runs if args.all or run.is_shown]
    shown_sweeps = [sweep for sweep in sweeps if args.all or sweep.is_shown]
    if args.json:
        content = {"runs": [*map(asdict, shown)], "sweeps": [*map(asdict, shown_sweeps)]}
        print(json.dumps(json_safe(content), indent=1, default=str))  # a folder as text
    else:
        for line in _lines(shown, shown_sweeps, num_hidden=len(runs) - len(shown), is_all=args.all):
            print(wrap_lines(line, line_width(sys.stdout) or WIDTH))
    return EXIT_FAILED if any(run.is_missing for run in runs) else EXIT_COMPLETED


def _lines(
    runs: Sequence[RunStatus], sweeps: Sequence[SweepStatus], *, num_hidden: int, is_all: bool
) -> Iterator[str]:
    for sweep in sweeps:
        yield printable(str(shown_path(sweep.folder)))
        counts = [f"{sweep.counts[name]} {name}" for name in ORDER if name in sweep.counts]
        total = counted(sum(sweep.counts.values()), "job")
        yield INDENT + printable(sweep.reason or f"sweep      {total}: {', '.join(counts)}")
    for run in runs:
        yield printable(str(shown_path(run.folder)))
        yield INDENT + "  ".join([f"{run.status:<9}", *_progress(run)]).rstrip()
        if facts := ", ".join(_facts(run)):
            yield INDENT + printable(facts)
        if run.reason is not None:
            yield INDENT + printable(run.reason)
    if not runs and not num_hidden and any(sweep.counts for sweep in sweeps):
        yield "no run has begun"
    elif not runs:
        yield "no run is here" if is_all else "no run is alive here"
    if num_hidden:
        yield f"{counted(num_hidden, 'run')} ended or not started: --all shows them"


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


def _facts(run: RunStatus) -> Iterator[str]:
    ranks = counted(run.num_ranks, "rank") if run.num_ranks else ""
    if ranks or run.hosts:
        yield " on ".join(filter(None, [ranks, listed(run.hosts)]))
    if run.restarts:
        yield counted(run.restarts, "restart")
    if run.tags:
        yield f"tags: {' '.join(run.tags)}"
    if run.seen_s is not None:
        yield f"last sign of life {duration(run.seen_s)} ago"


if __name__ == "__main__":
    main()
