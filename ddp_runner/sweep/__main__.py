"""``python -m ddp_runner.sweep FOLDER``: the table of a sweep, also while it runs."""

import sys
from pathlib import Path

from ddp_runner.errors import UserError
from ddp_runner.host.streams import line_width
from ddp_runner.job import EXIT_USER_ERROR
from ddp_runner.sweep.jobs import sentence
from ddp_runner.sweep.ledger import LEDGER
from ddp_runner.sweep.results import sweep_table


def main() -> None:
    """Print the table of each sweep folder that is named on the command line."""
    folders = [Path(name) for name in sys.argv[1:]]
    try:
        if not folders or any(str(folder).startswith("-") for folder in folders):
            raise UserError("write python -m ddp_runner.sweep FOLDER, the folder of a sweep")
        for folder in folders:
            if not (folder / LEDGER).is_file():
                raise UserError(f"{folder} is not the folder of a sweep: it holds no {LEDGER}")
            print(sweep_table(folder, width=line_width(sys.stdout)))
    except (UserError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
