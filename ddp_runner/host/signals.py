"""Which signals ask a run to stop, and how a process is started that leaves the answer to us."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Ctrl-C, schedulers and `kill`, a closed terminal, Ctrl-\, Slurm's --signal=USR1@60 and its like.
STOP_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)


def answered() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process was not started to ignore.

    nohup ignores SIGHUP, and the shell ignores SIGINT for the background jobs of a script: whoever
    started the process does not want it to end by them.
    """
    return tuple(one for one in STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN)


@contextmanager
def signals_ignored(**variables: str) -> Iterator[None]:
    """Let what is started in this block ignore the stop signals; give it environment variables.

    A fork server, a slot and, until they say otherwise, their workers inherit it: Ctrl-C and
    SIGTERM may reach all of them at once, and only the launcher decides what follows.
    """
    before = {name: os.environ.get(name) for name in variables}
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOP_SIGNALS}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, value_before in before.items():
            if value_before is None:
                del os.environ[name]
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
