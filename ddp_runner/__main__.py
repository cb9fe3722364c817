"""``python -m ddp_runner``: runs ``cli.app``, or with the argument ``new`` the module ``new``."""

import os
import signal
import sys
from contextlib import suppress

# Words of commands that start no ranks, or not here, or with variables of their own.
OTHERS = ("-", "hydra/", "hydra.job", "hydra.mode", "launch.")

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Ctrl-C during the imports below ends the process without a traceback, as in a C program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.argv[1:2] == ["new"]:  # it needs none of the imports of a run
    from ddp_runner.new import main
else:
    from ddp_runner.dist_env import RANKS
    from ddp_runner.host.processes import start_fork_server

    is_run = not any(word.lstrip("+~").startswith(OTHERS) for word in sys.argv[1:])
    is_run &= {"COMP_LINE", *RANKS}.isdisjoint(os.environ)
    if is_run and None not in (sys.stdin, sys.stdout, sys.stderr):  # None: it was closed
        with suppress(OSError):  # it is reported once the command is read
            start_fork_server()  # it imports torch while Hydra reads the command
    from ddp_runner.cli.app import main


def script() -> None:
    """Run the command ``ddp-runner``, which imports from the current folder, as ``-m`` does."""
    sys.path.insert(0, "")
    main()


if __name__ == "__main__":
    main()
