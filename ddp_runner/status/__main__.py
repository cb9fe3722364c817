"""The command ``python -m ddp_runner.status``: which runs are alive, and how far they are.

python -m ddp_runner.status
python -m ddp_runner.status outputs/SWEEP --all
python -m ddp_runner.status --watch
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_runner.errors import UserError
from ddp_runner.host.streams import line_width
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR
from ddp_runner.status.find import survey
from ddp_runner.status.render import as_json, as_text
from ddp_runner.tracking.outputs import OUTPUTS

WATCH_S = 2.0
WIDTH = 80  # of what is printed without a terminal


def main() -> None:
    """Run the command and exit."""
    try:
        sys.exit(run(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except BrokenPipeError:  # for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
