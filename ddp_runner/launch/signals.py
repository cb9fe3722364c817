"""How a launcher of several machines answers the stop signals; see ``stop_requests`` for one.

In a thread: the main thread may sit in torch's C++ code, where no handler runs. Torch-free.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType

from ddp_runner.errors import UserError
from ddp_runner.host.processes import handled_signals, kill_descendants
from ddp_runner.launch.ranks import SAVING_FACTOR
from ddp_runner.launch.scratch import Scratch
from ddp_runner.launch.stop_requests import ONE_REQUEST_S, RECORD_S, mark_ended

POLL_S = 0.5  # between two checks for a save


class StopSignals:
    """Turns the first stop signal into a request to all ranks, and a later one into their end.

    Args:
        scratch: where the ranks look for the request; removed if the run ends without a checkpoint.
        timeout_s: from the request to that end.
        running: returns the folders of the runs that such an end marks.
    """

    def __init__(
        self,
        scratch: Scratch,
        *,
        timeout_s: float,
        running: Callable[[], Iterable[os.PathLike[str]]],
    ) -> None:
        self.received: int | None = None
        self._scratch, self._timeout_s, self._running = scratch, timeout_s, running
        self._signals: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)

    def __enter__(self) -> "StopSignals":
        self._thread.start()
        self._previous = {one: signal.signal(one, self._receive) for one in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._signals.put(None)
        self._thread.join()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        # Nothing more in here: the main thread may be anywhere, even inside a print or holding the
        # lock of run.json, and goes on only when this returns.
        self.received = self.received or signum
        self._signals.put(signum)

    def _watch(self) -> None:
        signum = self._signals.get()
        if signum is None:
            return
        self._request_stop(signum)
        # After the last save, the run has timeout_s again to end.
        requested_at = saving_at = time.monotonic()
        deadline = requested_at + self._timeout_s
        last_deadline = requested_at + SAVING_FACTOR * self._timeout_s
        while True:
            try:
                if self._signals.get(timeout=max(0.0, deadline - time.monotonic())) is None:
                    return
                if time.monotonic() > requested_at + ONE_REQUEST_S:
                    break
            except Empty:
                now = time.monotonic()
                if self._scratch.saving.exists():
                    saving_at = now
                if now >= min(last_deadline, saving_at + self._timeout_s):
                    break
                deadline = now + min(POLL_S, self._timeout_s)
        self._end_at_once()

    def _request_stop(self, signum: int) -> None:
        self._scratch.make()
        self._scratch.stop.touch()
        is_training = self._scratch.ready.exists()
        what = "finishing the step and saving a checkpoint" if is_training else "stopping"
        print(f"\n{signal.Signals(signum).name}: {what}; again to end at once", flush=True)

    def _end_at_once(self) -> None:
        record = threading.Thread(target=self._mark_ended, daemon=True)
        record.start()
        record.join(RECORD_S)
        kill_descendants()
        shutil.rmtree(self._scratch.path, ignore_errors=True)
        os._exit(128 + (self.received or signal.SIGTERM))

    def _mark_ended(self) -> None:
        for run_dir in self._running():
            with suppress(UserError):  # the disk is full, or the folder is gone
                mark_ended(run_dir)
