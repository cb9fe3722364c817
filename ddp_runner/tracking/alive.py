"""Whether a run is alive: rank 0's sign of life, and how a run stands at one moment. Torch-free.

run.json says what the run wants to be. Whether a process still runs it follows from two signs. Its
lock is exact, but other machines may not see it. The heartbeat is seen everywhere, with a delay:
rank 0 renews `.heartbeat`, whose time is by the clock of the file system, so machines need not have
equal clocks. Its text says what rank 0 does. A killed run leaves the file, an ended run has none.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import NOFOLLOW, open_file
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record

BEAT_S, LEAST_S = 5.0, 0.5  # between two beats: usually, and when something new begins
NUM_BYTES = 512  # of the file, always: a full disk does not keep it from being written again
STARTING, EVALUATING, ENDING = "starting", "evaluating", "ending"
LOST, SILENT, DAMAGED = "lost", "silent", "damaged"
LOST_S = 60.0  # without a sign of life
STARTING_S = 300.0  # before the first heartbeat: importing torch, waiting for other machines


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


def _renew(path: Path, fields: Mapping[str, Any]) -> None:
    """Write the file again.

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
        except OSError:  # a full disk that writes each block to a new place
            os.utime(path, follow_symlinks=False)


def read_heartbeat(path: Path) -> tuple[dict[str, Any], float | None]:
    """Return a heartbeat's fields, none if it is damaged, and its time, None if there is none.

    Raises:
        UserError: the file is there and cannot be read.
    """
    with os_errors(f"{path} cannot be read", fix="make it readable, or delete it"):
        try:
            # An open file's facts come from the server, where a path's may be a minute old on NFS.
            with open_file(path) as file:
                text, mtime = file.read(NUM_BYTES), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return {}, None
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}
    return (fields if isinstance(fields, dict) else {}), mtime


@dataclass(frozen=True)
class Standing:
    """A run at one moment.

    `status` of a run that is alive is starting, running, evaluating or ending. Silent: its process
    exists and gives no sign. Lost: it should be alive, and no process runs it. Queued: it has not
    begun. Else it is the ``Status`` with which it ended, or damaged.
    """

    status: str
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json, unchecked
    beat: Mapping[str, Any] = field(default_factory=dict)  # rank 0's last one, of this session
    beat_at: float | None = None  # by the clock of the file system
    seen_s: float | None = None  # since the last sign of life; None of a run that has ended
    holder: tuple[int, str] | None = None  # the process that holds the run, or held it, and host
    fault: str | None = None  # why it is damaged

    @property
    def is_alive(self) -> bool:
        """Whether a process runs it, also one that gives no sign."""
        return self.status in (STARTING, Status.RUNNING, EVALUATING, ENDING, SILENT)

    @property
    def has_failed(self) -> bool:
        """Whether it failed, or is damaged."""
        return self.status in (Status.FAILED, DAMAGED)

    @property
    def sentence(self) -> str | None:
        """Why it failed or was stopped, in one line; None if nobody has said so."""
        return self.fault or self._error.get("sentence")

    @property
    def kind(self) -> str | None:
        """The kind of failure, as in ``Failure``; a run that is damaged is the user's to repair."""
        return "user" if self.fault else self._error.get("kind")

    @property
    def _error(self) -> Mapping[str, Any]:
        error = self.record.get("error")
        return error if isinstance(error, Mapping) else {}


def standing(run_dir: RunDir, *, server_time: Callable[[], float] = time.time) -> Standing:
    """Return how a run stands.

    Args:
        run_dir: of the run; it need not exist.
        server_time: returns the time by the clock of the folder's file system, which stamps files.
    """
    try:
        record = read_run_record(run_dir, missing_ok=True)
        if not record:
            return Standing(STARTING if run_dir.is_held else Status.QUEUED)
        beat, beat_at = read_heartbeat(run_dir.heartbeat)
    except UserError as error:
        return Standing(DAMAGED, fault=str(error))
    held, holder = run_dir.is_held, run_dir.holder_process
    recorded_at, held_at = _written(run_dir.record), _written(run_dir.holder) if held else 0.0
    is_of_session = beat.get("started_at") == last_session_start(record)
    if beat_at is not None and beat_at < (held_at if is_of_session else max(held_at, recorded_at)):
        beat, beat_at = {}, None  # of an earlier session, which was killed
    now = server_time()
    # On one machine the launcher holds the lock before rank 0 exists.
    host = beat.get("host") or (holder[1] if holder else record.get("host"))
    is_gone = held is False and host == socket.gethostname()
    if record.get("status") != Status.RUNNING:
        # A run that is resumed stays as it was until its state is restored.
        beats = beat_at is not None and not is_of_session and now - beat_at < LOST_S
        if held_at <= recorded_at and (is_gone or not beats):
            return _ended(run_dir, record, holder)
    signs = [recorded_at, held_at, _written(run_dir.metrics), beat_at or 0.0]
    seen_s = max(0.0, now - max(signs))
    is_fresh = seen_s < (LOST_S if beat_at else STARTING_S)
    status = LOST
    if held or (is_fresh and not is_gone):
        status = str(beat.get("doing", STARTING)) if is_fresh or beat_at is None else SILENT
    return Standing(status, record, beat, beat_at, seen_s, holder)


def _ended(run_dir: RunDir, record: Mapping[str, Any], holder: tuple[int, str] | None) -> Standing:
    """Return how a run stands that no process runs: as its record says."""
    status = record.get("status")
    if isinstance(status, str) and status in set(Status):
        return Standing(str(status), record, holder=holder)
    fault = f"{run_dir.record} has no status that a run has: {status!r:.40}; restore or delete it"
    return Standing(DAMAGED, record, fault=fault)


def _written(path: Path) -> float:
    """Return when a file was written, by the clock of its file system; 0.0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
