"""What the launcher makes of Ctrl-C and SIGTERM, and how it keeps them from what it starts.

Used by ``launch`` around a gang, and by ``slots`` around several. Torch-free.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_runner.job import STOP
from ddp_runner.record import RUN_RECORD, read_run_record, write_run_record

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns the first signal into a request to all gangs, and the second into their end.

    Args:
        folder: where the gangs look for the request; removed at an end without a checkpoint.
        timeout_s: from the request to that end.
        running: asked for the folders of the runs, which an end without a checkpoint marks.
        signals: what is answered; none in a process that is told by the one that started it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float,
        running: Callable[[], Iterable[Path]],
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        self.received: int | None = None
        self._folder, self._timeout_s, self._running = folder, timeout_s, running
        self._signals = signals
        self._previous: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        for signum in self._signals:
            self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._end_at_once()
        self.received = signum
        (self._folder / STOP).touch()
        name = signal.Signals(signum).name
        print(
            f"\n{name}: finishing the step and saving a checkpoint; again to end at once",
            flush=True,
        )
        self._timer = threading.Timer(self._timeout_s, self._end_at_once)
        self._timer.daemon = True
        self._timer.start()

    def _end_at_once(self) -> None:
        # What this process started dies with it: see die_with_launcher.
        for run_dir in self._running():
            if not (run_dir / RUN_RECORD).exists():
                continue
            if read_run_record(run_dir).get("status") != "running":
                continue  # its ranks were done meanwhile
            write_run_record(
                run_dir,
                status="preempted",
                finished_at=time.time(),
                error={"rank": None, "kind": "signal", "sentence": "ended without a checkpoint"},
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(128 + (self.received or signal.SIGTERM))


@contextmanager
def born_deaf(**variables: str) -> Iterator[None]:
    """Let what is started in this block ignore the signals; give it environment variables.

    What is ignored here stays ignored in a server or slot and, until they say otherwise, in its
    workers: Ctrl-C and SIGTERM may reach all of them at once, and only the launcher decides.
    """
    # Ended at once, the agent leaves semaphores, which the tracker removes; no need to tell of it.
    variables["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    before = {name: os.environ.get(name) for name in variables}
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in SIGNALS}
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
