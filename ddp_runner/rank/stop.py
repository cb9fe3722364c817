"""How a rank learns that it should stop, and how it ends with its launcher."""

import multiprocessing
import os
import signal
import sys
import threading
import time

from ddp_runner.host.processes import (
    die_with_parent,
    handled_signals,
    ignore_stop_signals,
    release_fork_server,
)
from ddp_runner.scratch import SAVING_POLL_S, Scratch

# From SIGTERM to the end of a rank whose launcher did not ask for a checkpoint: its worker group
# has failed, and the rank may be in a collective that never ends.
FAILED_GROUP_GRACE_S = 3.0
# From the launcher's end to that of a rank which the fork server has not ended by then.
SERVER_GRACE_S = 5.0


class StopRequest:
    """True once this rank should finish its step, save and end.

    Under our launcher the request is a file: Ctrl-C reaches every process of a terminal, SIGTERM
    may reach every process of a container, and only the launcher knows which it was. Under
    another launcher (torchrun, Slurm) any of ``STOP_SIGNALS`` is the request.
    """

    def __init__(self, scratch: Scratch | None, *, rank: int, attempt: int) -> None:
        self._scratch = scratch
        self.received: int | None = None  # the signal that this very rank received
        if scratch is None:
            for signum in handled_signals():
                signal.signal(signum, self._receive)
        else:
            ignore_stop_signals()
            _watch_sigterm(scratch, rank=rank, attempt=attempt)
            signal.signal(signal.SIGTERM, self._receive)

    def __call__(self) -> bool:
        """Return whether to stop; cheap enough for every step."""
        scratch = self._scratch
        if scratch is not None and (scratch.stop.exists() or scratch.regroup.exists()):
            return True
        return self.received is not None

    def _receive(self, signum: int, frame: object) -> None:
        self.received = self.received or signum


def _watch_sigterm(scratch: Scratch, *, rank: int, attempt: int) -> None:
    # The interpreter writes a signal's number here even while the main thread is in a collective,
    # where no Python handler runs.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def end_with_the_group() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            continue
        scratch.record_stack(rank=rank, attempt=attempt)
        deadline = time.monotonic() + FAILED_GROUP_GRACE_S
        # Rank 0 finishes the checkpoint that it is writing.
        while (rank == 0 and scratch.renew_saving()) or time.monotonic() < deadline:
            time.sleep(SAVING_POLL_S)
        if not scratch.stop.exists():
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end_with_the_group, name="sigterm-watch", daemon=True).start()


def die_with_launcher() -> None:
    """Make this process end when its launcher does, even by SIGKILL.

    The fork server ends when no process holds the other end of its pipe; on Linux the kernel then
    kills the server's children, even suspended and deadlocked ones. Elsewhere, and if that server
    hangs, a thread waits for the launcher's end.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def wait() -> None:
        launcher.join()
        if sys.platform == "linux":
            # The server first ends what this rank has started, and finds it only below a rank.
            time.sleep(SERVER_GRACE_S)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
    if sys.platform == "linux":
        die_with_parent()
        release_fork_server()
