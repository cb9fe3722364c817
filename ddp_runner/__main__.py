"""``python -m ddp_runner``: runs ``cli.app``, or with the argument ``new`` the module ``new``."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Ctrl-C during the imports below ends the process without a traceback, as in a C program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.argv[1:2] == ["new"]:  # it needs none of the imports of a run
    from ddp_runner.new import main
else:
    from ddp_runner.cli.app import main


def script() -> None:
    """Run the command ``ddp-runner``, which imports from the current folder, as ``-m`` does."""
    sys.path.insert(0, "")
    main()


if __name__ == "__main__":
    main()
