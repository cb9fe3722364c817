"""How a rank learns that it should stop, and how it makes sure not to outlive its launcher."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ddp_runner.host.signals import STOP_SIGNALS, answered
from ddp_runner.scratch import SAVING_POLL_S, STOP, record_stack, renewed

# From SIGTERM to the end of a rank whose launcher did not ask for a checkpoint: its worker group
# has failed, and it may sit in a collective that will never end.
FAILED_GROUP_GRACE_S = 3.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopRequest:
    """True once someone asked this rank to finish its step, save and end.

    Under our launcher the request is a file: Ctrl-C reaches every process of a terminal, SIGTERM
    may reach every process of a container, and only the launcher knows which it was. Under
    another launcher (torchrun, Slurm) any of ``STOP_SIGNALS`` is the request.
    """

    def __init__(self, scratch: Path | None, *, rank: int, attempt: int) -> None:
        self._file = scratch / STOP if scratch else None
        self.received: int | None = None  # the signal that asked this very rank
        if scratch is None:
            for signum in answered():
                signal.signal(signum, self._on_signal)
        else:
            for signum in STOP_SIGNALS:
                signal.signal(signum, signal.SIG_IGN)
            self._watch_sigterm(
                partial(record_stack, scratch, rank=rank, attempt=attempt),
                saves=partial(renewed, scratch) if rank == 0 else lambda: False,
            )
            signal.signal(signal.SIGTERM, self._on_signal)

    def __call__(self) -> bool:
        """Return whether to stop; cheap enough for every step."""
        return self.received is not None or (self._file is not None and self._file.exists())

    def _on_signal(self, signum: int, frame: object) -> None:
        self.received = self.received or signum

    def _watch_sigterm(
        self, record_stack: Callable[[], None], *, saves: Callable[[], bool]
    ) -> None:
        # The interpreter writes a signal's number here even while the main thread sits in a
        # collective, where no Python handler runs.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)

        def end_with_the_group() -> None:
            while os.read(reader, 1) != bytes([signal.SIGTERM]):
                continue
            record_stack()
            deadline = time.monotonic() + FAILED_GROUP_GRACE_S
            while saves() or time.monotonic() < deadline:  # a checkpoint is written to its end
                time.sleep(SAVING_POLL_S)
            if self._file is not None and not self._file.exists():
                os._exit(128 + signal.SIGTERM)

        threading.Thread(target=end_with_the_group, name="sigterm-watch", daemon=True).start()


def die_with_launcher() -> None:
    """Make sure that this worker ends when its launcher does, even by SIGKILL.

    The fork server ends when nobody holds the other end of its pipe; on Linux the kernel then
    kills its children, also one that is stopped or sits in a deadlock. Elsewhere a thread waits
    for the launcher's end.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def wait() -> None:
        launcher.join()
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
    if sys.platform == "linux":
        die_with_parent()
        # Each worker inherits that end of the pipe, to start processes of its own, and would keep
        # the server alive.
        server: Any = forkserver._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent is gone. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
