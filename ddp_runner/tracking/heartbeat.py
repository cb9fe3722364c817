"""The sign of life of a run: rank 0 renews `.heartbeat`, which a reader on any machine can judge.

The file's time is that of the last beat, by the clock of the file system, so machines need not have
equal clocks. Its text says what rank 0 does. A killed run leaves the file, and an ended run has
none. Torch-free.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.errors import os_errors
from ddp_runner.files import open_file
from ddp_runner.job import Status

BEAT_S, LEAST_S = 5.0, 0.5  # between two beats: usually, and when something new begins
NUM_BYTES = 512  # of the file, always: a reader never sees half of a longer text
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # a link could lead out of the run folder
STARTING, EVALUATING, ENDING = "starting", "evaluating", "ending"


@dataclass
class Heartbeat:
    """What rank 0 does now: one for each session; cheap enough to note each step."""

    doing: str = STARTING  # starting, running, evaluating or ending
    step: int | None = None  # the last one that is done
    epoch: int | None = None  # counts from 1
    total_steps: int | None = None  # None: not known
    total_epochs: int | None = None
    _noted_at: float = field(default_factory=time.monotonic)
    _has_changed: threading.Event = field(default_factory=threading.Event)

    def note(self, doing: str) -> None:
        """Note what begins now."""
        has_changed, self.doing, self._noted_at = doing != self.doing, doing, time.monotonic()
        if has_changed:
            self._has_changed.set()

    def step_done(self, step: int, *, epoch: int) -> None:
        """Note that a step is done."""
        self.step, self.epoch = step, epoch
        self.note(Status.RUNNING)

    @contextmanager
    def beating(self, path: Path, *, started_at: float) -> Iterator[None]:
        """Renew the file every few seconds while the block lasts; rank 0 only.

        A thread does it, so that a loop that waits for other ranks still shows a sign of life.

        Args:
            path: of the file.
            started_at: identifies the session, as in run.json.
        """
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": started_at}
        ended = threading.Event()

        def beat() -> None:
            while True:
                self._has_changed.clear()
                if ended.is_set():  # since the wait below
                    return
                _renew(path, facts | self._state())
                self._has_changed.wait(BEAT_S)
                if ended.wait(LEAST_S):
                    return

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._has_changed.set()
            thread.join(BEAT_S)  # not for ever: the disk may be gone
            with suppress(OSError):
                path.unlink()

    def _state(self) -> dict[str, Any]:
        shown = {name: one for name, one in vars(self).items() if not name.startswith("_")}
        return {**shown, "idle_s": round(time.monotonic() - self._noted_at, 1)}


def _renew(path: Path, fields: dict[str, Any]) -> None:
    """Write the file anew; on a full disk renew at least its time.

    It is closed each time, since NFS may keep what an open file holds for itself. Whatever fails
    here must not fail the run: a reader then sees how old the last beat is.
    """
    content = json.dumps(fields).encode()[:NUM_BYTES].ljust(NUM_BYTES - 1) + b"\n"
    with suppress(OSError):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | NOFOLLOW, 0o644)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)
        except OSError:
            os.utime(path, follow_symlinks=False)


def read_heartbeat(path: Path) -> tuple[dict[str, Any], float] | None:
    """Return a heartbeat's fields, and its time by the file system's clock; None if there is none.

    The fields are empty if the file is damaged.

    Raises:
        UserError: the file is there and cannot be read.
    """
    with os_errors(f"{path} cannot be read", fix="make it readable, or delete it"):
        try:
            # An open file's facts come from the server, where a path's may be a minute old on NFS.
            with open_file(path) as file:
                text, mtime = file.read(NUM_BYTES), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}
    return (fields if isinstance(fields, dict) else {}), mtime
