"""Which signals ask a run to stop, and how to start a process that leaves them to the launcher."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Ctrl-C, schedulers and `kill`, a closed terminal, Ctrl-\, and what Slurm's --signal=USR1@60 sends.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process was not started to ignore.

    nohup ignores SIGHUP, and a shell ignores SIGINT for a script's background jobs: whoever started
    the process does not want these signals to end it.
    """
    return tuple(one for one in STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN)


@contextmanager
def children_ignore_signals() -> Iterator[None]:
    """Let the processes that start in this block ignore the stop signals.

    Ctrl-C and SIGTERM may reach every process at once, and only the launcher decides what follows.
    """
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
