"""A rank's end of the pipe to its launcher.

A rank sends ``claimed, folder``, ``began, step`` once it has restored its state, ``ready`` when the
training loop begins, ``saving, flag`` around each checkpoint, and last ``result, value`` or
``failure, Failure``. The launcher sends ``stop``, and ``stack``, which the rank answers with
``stack, time_ns, text``. A thread receives, so that a rank answers even during a collective.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from ddp_runner.host.processes import handled_signals

# A message of up to 16 kB leaves in one write. Between two writes, a rank may be stopped or killed,
# and the launcher would wait for the rest.
MOST_BYTES = 12_000  # of text in a message
# A rank exits this long after its launcher, unless the fork server kills it first. The server can
# find the rank's children only while the rank lives.
SERVER_GRACE_S = 5.0


class Wire:
    """The pipe of one rank; safe to use from any of its threads."""

    def __init__(self, pipe: Connection) -> None:
        self.stop = False  # whether to finish the step, save and end
        self.has_signal = False  # whether a signal asks for the same
        self._pipe, self._sending = pipe, threading.Lock()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message. If the launcher is gone, ``_listen`` ends this rank."""
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Ask the launcher to wait for the end of this block before it ends the rank."""
        self.send("saving", True)
        try:
            yield
        finally:
            self.send("saving", False)

    def _listen(self) -> None:
        while True:
            try:
                (word,) = self._pipe.recv()
            except (EOFError, OSError):  # the launcher has ended
                time.sleep(SERVER_GRACE_S if sys.platform == "linux" else 0.0)
                os._exit(128 + signal.SIGKILL)
            if word == "stop":
                self.stop = True
            elif word == "stack":
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                self.send("stack", time.time_ns(), cut(stack))


class StopRequest:
    """Tells when this rank should finish its step, save and end.

    Ctrl-C reaches every process of a terminal, and SIGTERM may reach every process of a container,
    so our launcher decides, and asks over the wire. Under another launcher (torchrun, Slurm) any of
    ``STOP_SIGNALS`` is the request.
    """

    def __init__(self, wire: Wire | None) -> None:
        self._wire = wire
        self.received: int | None = None  # the first signal that this rank received
        # SIGTERM to a single rank, sent by hand, is a request too; the other signals are ignored.
        for signum in handled_signals() if wire is None else (signal.SIGTERM,):
            signal.signal(signum, self._receive)

    def __call__(self) -> bool:
        """Return whether to stop; cheap enough for every step."""
        return self.received is not None or (self._wire is not None and self._wire.stop)

    def _receive(self, signum: int, frame: object) -> None:
        self.received = self.received or signum
        if self._wire is not None:
            self._wire.has_signal = True


def cut(text: str) -> str:
    """Return the end of a text, where a stack has its innermost frame; the logs have it all."""
    data = text.encode(errors="replace")
    if len(data) <= MOST_BYTES:
        return text
    return f"(the beginning is in logs/)\n{data[-MOST_BYTES:].decode(errors='ignore')}"
