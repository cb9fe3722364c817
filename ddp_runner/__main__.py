"""``python -m ddp_runner``: see ``cli.app``."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Ctrl-C during the imports below ends the process without a traceback, as in a C program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from ddp_runner.cli.app import main

if __name__ == "__main__":
    main()
