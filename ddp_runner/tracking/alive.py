"""How a run stands at one moment: the one answer for status, sweeps and comparisons. Torch-free.

run.json says what the run wants to be. Whether a process still runs it follows from two signs. Its
lock is exact, but other machines may not see it. The heartbeat is seen everywhere, with a delay.
"""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.tracking.heartbeat import ENDING, EVALUATING, STARTING, read_heartbeat
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record

LOST, SILENT, DAMAGED = "lost", "silent", "damaged"
LOST_S = 60.0  # without a sign of life; a heartbeat comes every five seconds
STARTING_S = 300.0  # before the first heartbeat: importing torch, waiting for other machines


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
    def sentence(self) -> str | None:
        """Why it failed or was stopped, in one line; None if nobody has said so."""
        return self.fault or self._error("sentence")

    @property
    def kind(self) -> str | None:
        """The kind of failure, as in ``Failure``; a run that is damaged is the user's to mend."""
        return "user" if self.fault else self._error("kind")

    def _error(self, name: str) -> str | None:
        error = self.record.get("error")
        value = error.get(name) if isinstance(error, Mapping) else None
        return value if isinstance(value, str) else None


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
        beat, beat_at = read_heartbeat(run_dir.heartbeat) or ({}, None)
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
    if status in set(Status):
        return Standing(str(status), record, holder=holder)
    fault = f"{run_dir.record} has no status that a run has: {status!r:.40}; restore or delete it"
    return Standing(DAMAGED, record, fault=fault)


def _written(path: Path) -> float:
    """Return when a file was written, by the clock of its file system; 0.0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
