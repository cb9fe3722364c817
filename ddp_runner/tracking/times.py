"""The times in run.json: of each session of a run, from a start to its end, and of the whole run.

A run's ``wall_s`` is the time of all its sessions, without the pauses between them; ``started_at``
and ``startup_s`` are those of the first. Torch-free.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import (
    RunFields,
    RunTimes,
    SessionTimes,
    read_run_record,
    write_run_record,
)


def begin_session(
    run_dir: os.PathLike[str], *, started_at: float, **fields: Unpack[RunFields]
) -> None:
    """Record that a session began; a second call for the same session changes no time.

    A session that failed ended when its failure was recorded. For a session that was killed, take
    the last write to metrics.jsonl, or else to run.json, as its end.

    Args:
        run_dir: the run's folder.
        started_at: time.time() when the command, or the sweep's job, began; identifies the session.
        fields: further fields of run.json.

    Raises:
        UserError: run.json is damaged or cannot be written.
    """
    known = read_run_record(run_dir, missing_ok=True)
    sessions = _sessions(known)
    if not sessions or sessions[-1]["started_at"] != started_at:
        if sessions and sessions[-1]["wall_s"] is None:
            ended_at = known.get("finished_at") or _last_written_at(run_dir)
            sessions[-1]["wall_s"] = _seconds(sessions[-1], ended_at)
        sessions.append({"started_at": started_at, "startup_s": None, "wall_s": None})
    write_run_record(run_dir, **_totals(sessions), **fields)


def is_refused_resume(run_dir: os.PathLike[str], before: Mapping[str, Any]) -> bool:
    """Return whether a run that had begun before did not reach its first step this time.

    Args:
        run_dir: the run's folder.
        before: its run.json before this session; empty where there was none.
    """
    sessions = _sessions(read_run_record(run_dir))
    return before.get("startup_s") is not None and sessions[-1]["startup_s"] is None


def begin_anew(run_dir: os.PathLike[str]) -> None:
    """Forget the earlier sessions: this one starts at step 0, without their metrics."""
    write_run_record(run_dir, **_totals(_sessions(read_run_record(run_dir))[-1:]))


def note_startup(run_dir: os.PathLike[str]) -> None:
    """Record that this session's start-up ends now."""
    sessions = _sessions(read_run_record(run_dir))
    sessions[-1]["startup_s"] = _seconds(sessions[-1], time.time())
    write_run_record(run_dir, **_totals(sessions))


def end_session(run_dir: os.PathLike[str], **fields: Unpack[RunFields]) -> None:
    """Record that this session ends now, with further fields of run.json."""
    finished_at, sessions = time.time(), _sessions(read_run_record(run_dir))
    sessions[-1]["wall_s"] = _seconds(sessions[-1], finished_at)
    write_run_record(run_dir, **_totals(sessions, finished_at=finished_at), **fields)


def _sessions(record: Mapping[str, Any]) -> list[SessionTimes]:
    """Return copies of a run's sessions; a record of an older version has only the run's times."""
    run = SessionTimes(
        started_at=record.get("started_at", 0.0),
        startup_s=record.get("startup_s"),
        wall_s=record.get("wall_s"),
    )
    sessions: list[SessionTimes] = record.get("sessions", [run] if record.get("started_at") else [])
    return [session.copy() for session in sessions]


def _totals(sessions: Sequence[SessionTimes], *, finished_at: float | None = None) -> RunTimes:
    walls = [session["wall_s"] for session in sessions]
    known = [wall_s for wall_s in walls if wall_s is not None]
    return {
        "started_at": sessions[0]["started_at"],
        "startup_s": sessions[0]["startup_s"],
        "wall_s": None if len(known) < len(walls) else round(sum(known), 3),
        "sessions": list(sessions),
        "finished_at": finished_at,
    }


def _seconds(session: SessionTimes, until: float) -> float:
    return round(max(0.0, until - float(session["started_at"])), 3)


def _last_written_at(folder: os.PathLike[str]) -> float:
    run_dir = RunDir(Path(folder))
    path = run_dir.metrics if run_dir.metrics.exists() else run_dir.record
    return path.stat().st_mtime
