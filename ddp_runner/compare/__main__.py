"""The command ``python -m ddp_runner.compare``: compare the settings and the results of runs.

python -m ddp_runner.compare outputs
python -m ddp_runner.compare outputs/SWEEP --target eval/accuracy=0.95 --out report
"""

import argparse
import gc
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_runner.compare.analysis import TOLERANCE, Comparison, compare
from ddp_runner.compare.formats import FORMATS, SUFFIXES, listing, remarks, width_of
from ddp_runner.compare.recorded_run import Target
from ddp_runner.compare.run_reader import read_runs, tagged
from ddp_runner.errors import UserError, exit_with, os_errors
from ddp_runner.files import replace_file
from ddp_runner.host.streams import wrap_lines


def main() -> None:
    """Run the command and exit."""
    gc.disable()  # the runs stay in memory to the end: searching them for garbage is a tenth
    if isinstance(sys.stdout, io.TextIOWrapper):  # a run's name may not be encodable
        sys.stdout.reconfigure(errors="backslashreplace")
    exit_with(run)


def run(arguments: Sequence[str]) -> None:
    """Compare the runs that a command line names.

    Raises:
        UserError: a path contains no run, no run has a metric, or `--out` cannot be written.
    """
    args = _parser().parse_args(arguments)
    comparison = compare(
        tagged(read_runs(args.paths), args.tag),
        target=_target(args.target) if args.target else None,
        best=args.best,
        mode=args.mode,
        over=args.over,
        tolerance=args.tolerance,
        each=args.each,
    )
    written = write_all(comparison, args.out, paths=args.paths) if args.out is not None else []
    print(FORMATS[args.format](comparison), flush=True)
    width = width_of(sys.stderr)
    for line in listing(remarks(comparison), width=width) if args.format == "csv" else ():
        print(line, file=sys.stderr)
    for line in written:
        print(wrap_lines(line, width), file=sys.stderr)


def write_all(comparison: Comparison, folder: Path, *, paths: Sequence[Path]) -> list[str]:
    """Write all formats, the plots and the report into a folder; return a line for each.

    Raises:
        UserError: the folder cannot be written.
    """
    from ddp_runner.compare.drawing import write_plots
    from ddp_runner.compare.plots import figures  # imports matplotlib, which is slow
    from ddp_runner.compare.report import html

    lines = []
    with os_errors(f"--out ({folder}) cannot be written", fix="choose a writable folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, formatted in FORMATS.items():
            path = folder / f"comparison.{SUFFIXES[name]}"
            text = formatted(comparison) + "\n"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            lines.append(f"wrote {path}")
        plots = figures(comparison)
        lines += write_plots(plots, folder)
        page = html(comparison, plots, paths=paths).encode(errors="backslashreplace")
        replace_file(folder / "report.html", page)
        return [*lines, f"wrote {folder / 'report.html'}"]


def _target(text: str) -> Target:
    metric, _, value = text.rpartition("=")
    try:
        return Target(metric, float(value))
    except ValueError:
        raise UserError(
            f"--target ({text}) is not METRIC=VALUE", "write --target eval/accuracy=0.95"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.compare",
        description="Compare the settings and the results of runs. Samples per second are the "
        "median of a run's lines without the first, the warm-up.",
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="a run, a sweep, or outputs")
    add("--format", choices=FORMATS, default="table", help="format to print (default: table)")
    tag = "only runs with this tag; repeat the option for runs with all of several tags"
    add("--tag", action="append", default=[], metavar="NAME", help=tag)
    add("--out", type=Path, metavar="FOLDER", help="also write all formats and plots into a folder")
    add("--each", action="store_true", help="show a row for each run, not a mean over seeds")
    add("--target", metavar="METRIC=VALUE", help="show the time to, say, eval/accuracy=0.95")
    add("--best", metavar="METRIC", help="name the setting with the best value of this metric")
    add("--mode", choices=("max", "min"), help="for --best (default: min for losses and costs)")
    over = "average over this key beside the seed, such as dataset.train.fold"
    add("--over", metavar="KEY", default="seed", help=over)
    tolerance = "relative difference of losses that counts as parity (default: %(default)s)"
    add("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    return parser


if __name__ == "__main__":
    main()
