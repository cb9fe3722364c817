"""``python -m ddp_runner``: see ``cli.app``; with the word ``new``: ``new``."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Ctrl-C during the imports below ends the process without a traceback, as in a C program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.argv[1:2] == ["new"]:  # it needs neither Hydra nor what a run imports
    from ddp_runner.new import main
else:
    from ddp_runner.cli.app import main


def script() -> None:
    """Run the command ``ddp-runner``, which finds the packages in this folder as ``-m`` does."""
    sys.path.insert(0, "")
    main()


if __name__ == "__main__":
    main()
