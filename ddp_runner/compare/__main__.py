"""The command ``python -m ddp_runner.compare PATHS…``: which setting, and what does it cost?

    python -m ddp_runner.compare outputs
    python -m ddp_runner.compare outputs/SWEEP --target eval/accuracy=0.95 --out report

Reads run folders below the paths and shows what differs between them against what came out.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_runner.compare.analysis import TOLERANCE, Comparison, compare
from ddp_runner.compare.render.tables import FORMATS, SUFFIXES, remarks
from ddp_runner.compare.runs import read_runs
from ddp_runner.compare.stats import Target
from ddp_runner.errors import UserError


def main() -> None:
    """Run the command and exit."""
    try:
        sys.exit(run(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: Sequence[str]) -> int:
    """Compare what a command line names; return the exit code.

    Raises:
        UserError: a path holds no run, no run has a metric, or `--out` cannot be written.
    """
    args = _parser().parse_args(arguments)
    comparison = compare(
        read_runs(args.paths),
        target=_target(args.target) if args.target else None,
        best=args.best,
        mode=args.mode,
        tolerance=args.tolerance,
        each=args.each,
        include_packed=args.include_packed,
    )
    written = write_all(comparison, args.out) if args.out is not None else []
    print(FORMATS[args.format](comparison), flush=True)
    if args.format == "csv":
        for title, sentences in remarks(comparison):
            print(f"{title}:", *(f"  {one}" for one in sentences), sep="\n", file=sys.stderr)
    for line in written:
        print(line, file=sys.stderr)
    return 0


def write_all(comparison: Comparison, folder: Path) -> list[str]:
    """Write every format, every plot and runs for TensorBoard into a folder; a line about each.

    Raises:
        UserError: the folder cannot be written.
    """
    from ddp_runner.compare.render.plots import write_plots  # its matplotlib takes half a second
    from ddp_runner.compare.render.tensorboard import write_board

    lines = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, form in FORMATS.items():
            path = folder / f"comparison.{SUFFIXES[name]}"
            path.write_text(form(comparison) + "\n", encoding="utf-8")
            lines.append(f"wrote {path}")
        earlier = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
        lines += write_plots(comparison, folder)
        plots = [
            path
            for path in sorted(folder.glob("*.png"))
            if path.stat().st_mtime_ns != earlier.get(path)
        ]
        return lines + write_board(comparison, folder / "tensorboard", pictures=plots)
    except OSError as error:
        raise UserError(
            f"--out ({folder}) cannot be written ({error.strerror}); name a folder that can"
        ) from error


def _target(text: str) -> Target:
    metric, _, value = text.rpartition("=")
    try:
        return Target(metric, float(value))
    except ValueError:
        raise UserError(
            f"--target ({text}) is not METRIC=VALUE; write --target eval/accuracy=0.95"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.compare",
        description="Compare runs: what was set differently, and what came out. Samples per second "
        "are the median of a run's lines without the first, the warm-up.",
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="a run's folder, a sweep's, or outputs")
    add("--format", choices=FORMATS, default="table", help="what is printed (default: table)")
    add("--out", type=Path, metavar="FOLDER", help="write all formats and the plots into it")
    add("--each", action="store_true", help="a row for each run, not one for all its seeds")
    add(
        "--target",
        metavar="METRIC=VALUE",
        help="when it was reached, as in eval/accuracy=0.95 (a loss: from above)",
    )
    add("--best", metavar="METRIC", help="name the best run by it")
    add("--mode", choices=("max", "min"), help="of --best (default: min for losses and costs)")
    add(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="part of itself by which a loss may differ between modes (default: %(default)s)",
    )
    add("--include-packed", action="store_true", help="packed runs count for speedups too")
    return parser


if __name__ == "__main__":
    main()
