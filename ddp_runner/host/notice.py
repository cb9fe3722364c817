"""A line about what a process waits for, printed only if the wait is long. Torch-free."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_runner.host.streams import print_line

PATIENCE_S = 2.0


@contextmanager
def notice_if_slow(text: str, *, enabled: bool = True) -> Iterator[None]:
    """Print the text once if the ``with`` block takes longer than two seconds.

    Args:
        text: what the block waits for, and where.
        enabled: False: print nothing.
    """
    timer = threading.Timer(PATIENCE_S, lambda: print_line(text, stream=sys.stdout))
    timer.daemon = True
    if enabled:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if enabled:
            timer.join()  # a line that is being printed ends before the next one
