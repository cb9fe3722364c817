"""The command ``python -m ddp_runner.sweep FOLDER``: prints the table of a sweep."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_runner.errors import UserError, exit_with, os_errors
from ddp_runner.host.streams import line_width
from ddp_runner.sweep.sweep_dir import PLAN
from ddp_runner.sweep.sweep_table import sweep_table


def main() -> None:
    """Run the command and exit."""
    exit_with(run)


def run(arguments: Sequence[str]) -> None:
    """Print the table of each sweep folder on the command line."""
    if not arguments or any(word.startswith("-") for word in arguments):
        raise UserError("write python -m ddp_runner.sweep FOLDER, with the folder of a sweep")
    for folder in map(Path, arguments):
        with os_errors(f"{folder} cannot be read", fix="make it readable"):
            if not (folder / PLAN).is_file():
                raise UserError(f"{folder} is not the folder of a sweep: {PLAN} is missing")
            table = sweep_table(folder, width=line_width(sys.stdout))
        print(table)


if __name__ == "__main__":
    main()
