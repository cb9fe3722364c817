"""The times of a run in run.json: of each session, from a start to its end, and of all. Torch-free.

A run's ``wall_s`` is the time of all its sessions, without the time that it lay still between them;
``started_at`` and ``startup_s`` are those of the first.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_runner.tracking.run_record import RUN_RECORD, read_run_record, write_run_record

METRICS_FILE = "metrics.jsonl"


def begin_session(run_dir: Path, *, started_at: float, **fields: Any) -> None:
    """Write into run.json that a session began; a second call for the same one changes no time.

    A session that failed ended when that was recorded. One that was killed is taken to have ended
    when it last wrote a line of metrics, else run.json: what it did after that is not known.

    Args:
        run_dir: of the run.
        started_at: time.time() when the command, or the sweep's job, began; tells sessions apart.
        fields: further fields of run.json.

    Raises:
        UserError: run.json is damaged or cannot be written.
    """
    known = read_run_record(run_dir) if (run_dir / RUN_RECORD).exists() else {}
    sessions = _sessions(known)
    if not sessions or sessions[-1]["started_at"] != started_at:
        if sessions and sessions[-1]["wall_s"] is None:
            ended_at = known.get("finished_at") or _last_written_at(run_dir)
            sessions[-1]["wall_s"] = _seconds(sessions[-1], ended_at)
        sessions.append({"started_at": started_at, "startup_s": None, "wall_s": None})
    write_run_record(run_dir, **_totals(sessions), finished_at=None, **fields)


def is_refused_resume(run_dir: Path, before: Mapping[str, Any]) -> bool:
    """Return whether a run that had begun before did not come to its first step this time.

    Args:
        run_dir: of the run.
        before: its run.json before this session; empty where there was none.
    """
    sessions = _sessions(read_run_record(run_dir))
    return before.get("startup_s") is not None and sessions[-1]["startup_s"] is None


def begin_anew(run_dir: Path) -> None:
    """Forget the sessions before this one: it starts at step 0, and their metrics are cut away."""
    write_run_record(run_dir, **_totals(_sessions(read_run_record(run_dir))[-1:]))


def note_startup(run_dir: Path) -> None:
    """Write down that this session's start-up ends now."""
    sessions = _sessions(read_run_record(run_dir))
    sessions[-1]["startup_s"] = _seconds(sessions[-1], time.time())
    write_run_record(run_dir, **_totals(sessions))


def end_session(run_dir: Path, **fields: Any) -> None:
    """Write down that this session, and so the run for now, ends now; and further fields."""
    finished_at, sessions = time.time(), _sessions(read_run_record(run_dir))
    sessions[-1]["wall_s"] = _seconds(sessions[-1], finished_at)
    write_run_record(run_dir, **_totals(sessions), finished_at=finished_at, **fields)


def _sessions(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of a run's sessions; a record without the field has one at most."""
    keys = ("started_at", "startup_s", "wall_s")
    only = [{key: record.get(key) for key in keys}] if record.get("started_at") else []
    return [dict(one) for one in record.get("sessions", only)]


def _totals(sessions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    walls = [one["wall_s"] for one in sessions]
    return {
        "started_at": sessions[0]["started_at"],
        "startup_s": sessions[0]["startup_s"],
        "wall_s": None if None in walls else round(sum(walls), 3),
        "sessions": list(sessions),
    }


def _seconds(session: dict[str, Any], until: float) -> float:
    return round(max(0.0, until - float(session["started_at"])), 3)


def _last_written_at(run_dir: Path) -> float:
    lines = run_dir / METRICS_FILE
    return (lines if lines.exists() else run_dir / RUN_RECORD).stat().st_mtime
