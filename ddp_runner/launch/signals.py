"""What the launcher makes of Ctrl-C, SIGTERM and their like while ranks run.

Used by ``launch`` around one worker group, and by ``slots`` around several. Torch-free.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from ddp_runner.errors import UserError
from ddp_runner.host.children import kill_descendants
from ddp_runner.host.signals import answered
from ddp_runner.job import Status
from ddp_runner.scratch import SAVING, SAVING_FACTOR, STOP
from ddp_runner.tracking.run_record import RUN_RECORD, read_run_record, write_run_record

# timeout(1) signals its child and then the whole process group, systemd sends SIGHUP right after
# SIGTERM, and a terminal's Ctrl-C may come with a wrapper's: all that is one request.
ONE_REQUEST_S = 0.5
POLL_S = 0.5  # between two looks whether it still is
RECORD_S = 2.0  # for run.json, whose lock a rank may hold that is stopped


class Interrupts:
    """Turns the first signal into a request to all ranks, and a later one into their end.

    Args:
        folder: where the ranks look for the request; removed at an end without a checkpoint.
        timeout_s: from the request to that end.
        running: asked for the folders of the runs, which an end without a checkpoint marks.
        answers: False in a process that is told by the one that started it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float,
        running: Callable[[], Iterable[Path]],
        answers: bool = True,
    ) -> None:
        self.received: int | None = None
        self._folder, self._timeout_s, self._running = folder, timeout_s, running
        self._answers = answers
        self._previous: dict[int, Any] = {}
        self._signals: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)

    def __enter__(self) -> "Interrupts":
        if self._answers:
            self._thread.start()
            for signum in answered():
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._answers:
            self._signals.put(None)
            self._thread.join()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        # Nothing more in here: the main thread may be inside anything, the lock of run.json or a
        # print included, and goes on only when this returns.
        self.received = self.received or signum
        self._signals.put(signum)

    def _watch(self) -> None:
        signum = self._signals.get()
        if signum is None:
            return
        self._ask(signum)
        asked_at = time.monotonic()
        deadline = asked_at + self._timeout_s
        last_deadline = asked_at + SAVING_FACTOR * self._timeout_s
        saving_at = asked_at  # once the checkpoint is written, the run has as long to end again
        while True:
            try:
                if self._signals.get(timeout=max(0.0, deadline - time.monotonic())) is None:
                    return
                if time.monotonic() > asked_at + ONE_REQUEST_S:
                    break
            except Empty:
                now = time.monotonic()
                if self._is_saving():
                    saving_at = now
                if now >= min(last_deadline, saving_at + self._timeout_s):
                    break
                deadline = now + min(POLL_S, self._timeout_s)
        self._end_at_once()

    def _ask(self, signum: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files was here
        (self._folder / STOP).touch()
        print(
            f"\n{signal.Signals(signum).name}: finishing the step and saving a checkpoint; "
            "again to end at once",
            flush=True,
        )

    def _is_saving(self) -> bool:
        return any(SAVING in files for _, _, files in os.walk(self._folder))

    def _end_at_once(self) -> None:
        record = threading.Thread(target=self._record_end, daemon=True)
        record.start()
        record.join(RECORD_S)
        kill_descendants()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(128 + (self.received or signal.SIGTERM))

    def _record_end(self) -> None:
        for run_dir in self._running():
            with suppress(UserError):  # the disk is full, or the folder is gone
                mark_ended(run_dir)


def mark_ended(run_dir: Path) -> None:
    """Mark a run that its launcher leaves without a checkpoint, unless it has ended by itself.

    Raises:
        UserError: run.json cannot be read or written.
    """
    if (
        not (run_dir / RUN_RECORD).exists()
        or read_run_record(run_dir).get("status") != Status.RUNNING
    ):
        return
    write_run_record(
        run_dir,
        status=Status.PREEMPTED,
        finished_at=time.time(),
        error={"rank": None, "kind": "signal", "sentence": "ended without a checkpoint"},
    )
