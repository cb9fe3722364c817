"""Whether a run is alive: rank 0's heartbeat, and the standing of a run. Torch-free.

A killed run cannot update run.json, so its lock and its heartbeat tell whether a process still runs
it: see "How `status` knows" in docs/observing.md.
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
from ddp_runner.files import json_object, open_file
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record

BEAT_S, LEAST_S = 5.0, 0.5  # time between beats: the usual, and the shortest
NUM_BYTES = 512  # constant file size, so a full disk still lets rank 0 overwrite it
STARTING, EVALUATING, ENDING = "starting", "evaluating", "ending"
LOST, SILENT, DAMAGED = "lost", "silent", "damaged"
LOST_S = 60.0  # a run without a sign of life for this long is lost
STARTING_S = 300.0  # the same before the first heartbeat: torch imports, other machines join


@dataclass
class Heartbeat:
    """What rank 0 does now, for one session. Noting a step is cheap."""

    doing: str = STARTING  # starting, running, evaluating or ending
    step: int | None = None  # the last completed step
    epoch: int | None = None  # counts from 1
    total_steps: int | None = None  # None: unknown
    total_epochs: int | None = None
    _noted_at: float = field(default_factory=time.monotonic)
    _has_changed: threading.Event = field(default_factory=threading.Event)

    def note(self, doing: str) -> None:
        """Set what rank 0 does from now on."""
        has_changed, self.doing, self._noted_at = doing != self.doing, doing, time.monotonic()
        if has_changed:
            self._has_changed.set()

    def step_done(self, step: int, *, epoch: int) -> None:
        """Note a completed step."""
        self.step, self.epoch = step, epoch
        self.note(Status.RUNNING)

    @contextmanager
    def beating(self, path: Path, *, started_at: float) -> Iterator[None]:
        """Rewrite the file every few seconds during the block. Rank 0 only.

        A thread writes it, so a loop that waits for other ranks still shows a sign of life.
        `started_at` identifies the session, as in run.json.
        """
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": started_at}
        ended = threading.Event()

        def beat() -> None:
            while True:
                self._has_changed.clear()
                if ended.is_set():  # set after the wait below
                    return
                _write_heartbeat(path, facts | self._state())
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
            thread.join(BEAT_S)  # with a limit: a write to a lost disk may hang
            with suppress(OSError):  # a read-only or lost disk; its own error is more useful
                path.unlink()

    def _state(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**fields, "idle_s": round(time.monotonic() - self._noted_at, 1)}


def _write_heartbeat(path: Path, fields: Mapping[str, Any]) -> None:
    """Overwrite the file, and close it each time: NFS may cache what an open file holds."""
    content = json.dumps(fields).encode()[:NUM_BYTES].ljust(NUM_BYTES - 1) + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    # A link may lead anywhere. A full disk must not end the run here; readers see an old beat.
    with suppress(OSError), os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        os.utime(file.fileno())  # first: on a full disk the write may fail
        os.write(file.fileno(), content)


def read_heartbeat(path: Path) -> tuple[dict[str, Any], float | None]:
    """Return a heartbeat's fields ({} if damaged) and its time (None if the file is missing).

    Raises:
        UserError: the file exists and cannot be read.
    """
    with os_errors(f"{path} cannot be read", fix="make it readable, or delete it"):
        try:
            # fstat of an open file asks the NFS server; stat of a path may be a minute old.
            with open_file(path) as file:
                text, mtime = file.read(NUM_BYTES), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return {}, None
    return json_object(text), mtime


@dataclass(frozen=True)
class Standing:
    """A run at one moment. docs/observing.md explains the words of its status."""

    status: str
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json, unchecked
    beat: Mapping[str, Any] = field(default_factory=dict)  # fields of this session's heartbeat
    beat_at: float | None = None  # time of the heartbeat, by the file system's clock
    seen_s: float | None = None  # seconds since the last sign of life; None: the run has ended
    holder: tuple[int, str] | None = None  # process id and host of the lock's last holder
    fault: str | None = None  # why the run is damaged

    @property
    def is_alive(self) -> bool:
        """Whether a process runs it, even if it gives no sign."""
        return self.status in (STARTING, Status.RUNNING, EVALUATING, ENDING, SILENT)

    @property
    def has_failed(self) -> bool:
        """Whether it failed or is damaged."""
        return self.status in (Status.FAILED, DAMAGED)

    @property
    def sentence(self) -> str | None:
        """Why it failed or was stopped, in one line; None: unknown."""
        return self.fault or self._error.get("sentence")

    @property
    def kind(self) -> str | None:
        """The kind of failure, as in ``Failure``; "user" for a damaged run."""
        return "user" if self.fault else self._error.get("kind")

    @property
    def _error(self) -> Mapping[str, Any]:
        error = self.record.get("error")
        return error if isinstance(error, Mapping) else {}


def standing(run_dir: RunDir, *, server_time: Callable[[], float] = time.time) -> Standing:
    """Return the standing of a run, whose folder need not exist.

    `server_time` returns the time by the clock of the folder's file system, which stamps files.
    """
    try:
        record = read_run_record(run_dir, missing_ok=True)
        if not record:
            return Standing(STARTING if run_dir.is_held else Status.QUEUED)
        beat, beat_at = read_heartbeat(run_dir.heartbeat)
    except UserError as error:
        return Standing(DAMAGED, fault=str(error))
    is_held, holder = run_dir.is_held, run_dir.holder_process
    recorded_at, held_at = _mtime(run_dir.record), _mtime(run_dir.holder) if is_held else 0.0
    is_of_session = beat.get("started_at") == last_session_start(record)
    oldest = held_at if is_of_session else max(held_at, recorded_at)
    if beat_at is not None and beat_at < oldest:
        beat, beat_at = {}, None  # left by an earlier session that was killed
    now = server_time()
    # On one machine the launcher holds the lock before rank 0 exists.
    host = beat.get("host") or (holder[1] if holder else record.get("host"))
    is_gone = is_held is False and host == socket.gethostname()
    if record.get("status") != Status.RUNNING:
        # A resumed run keeps its old status until its state is restored.
        is_resuming = beat_at is not None and not is_of_session and now - beat_at < LOST_S
        if held_at <= recorded_at and (is_gone or not is_resuming):
            if (status := record.get("status")) in tuple(Status):
                return Standing(status, record, holder=holder)
            fault = f"{run_dir.record} has an unknown status ({status!r:.40})"
            return Standing(DAMAGED, record, fault=f"{fault}; restore or delete the file")
    seen_s = max(0.0, now - max(recorded_at, held_at, _mtime(run_dir.metrics), beat_at or 0.0))
    is_fresh = seen_s < (LOST_S if beat_at else STARTING_S)
    status = LOST
    if is_held or (is_fresh and not is_gone):
        status = str(beat.get("doing", STARTING)) if is_fresh or beat_at is None else SILENT
    return Standing(status, record, beat, beat_at, seen_s, holder)


def _mtime(path: Path) -> float:
    """Return when a file was last written, by its file system's clock; 0.0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:  # a run that ends deletes its heartbeat and the lock's holder at any moment
        return 0.0
