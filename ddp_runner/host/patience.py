"""Waits for calls of torch that may block for minutes, while this process still answers signals.

Python runs a signal's handler in the main thread only, and not while that thread is inside C++, as
in a read from a store whose machine is gone. Torch-free.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ddp_runner.host.streams import PATIENCE_S, print_line

T = TypeVar("T")
POLL_S = 0.05


class StoppedError(Exception):
    """The user wants the run to end while its machines are still waiting for each other."""


def patiently(
    call: Callable[[], T],
    *,
    limit_s: float,
    stop_requested: Callable[[], bool] = lambda: False,
    notice: Callable[[], str] | None = None,
) -> T:
    """Return what a call returns, which runs in a thread of its own.

    Args:
        call: may block. After an error of this function it goes on, in a daemon thread.
        limit_s: seconds that it may take.
        stop_requested: asked again and again.
        notice: what is printed once this takes longer than two seconds, and when it changes.

    Raises:
        TimeoutError: it takes longer.
        StoppedError: a stop was requested meanwhile.
        BaseException: whatever the call raises.
    """
    future = Future[T]()
    threading.Thread(target=_fulfil, args=(future, call), daemon=True).start()
    begun_at, shown = time.monotonic(), ""
    while not wait([future], timeout=POLL_S).done:
        elapsed_s = time.monotonic() - begun_at
        if stop_requested():
            raise StoppedError
        if elapsed_s > limit_s:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        if notice and elapsed_s > PATIENCE_S and (text := notice()) not in ("", shown):
            print_line(text, stream=sys.stdout)
            shown = text
    return future.result()


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
