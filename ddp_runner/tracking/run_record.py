"""run.json: its fields, and the times of a run's sessions. Torch-free.

A session lasts from a start of the run to its end. One process writes the file at a time: whoever
has claimed the folder until there are ranks, rank 0 while they live, and then the launcher. On
several machines all launchers may write how the run ended: a lock on the folder keeps all fields.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ddp_runner.errors import UserError, os_errors, typed
from ddp_runner.files import json_safe, read_file, replace_file
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import RUN_RECORD, RunDir


class SessionTimes(TypedDict):
    """The times of one session."""

    started_at: float  # time.time() when the command, or the sweep's job, began
    startup_s: float | None  # None: it has not reached its first step
    wall_s: float | None  # None: it has not ended


class RunError(TypedDict):
    """Why a run failed; `kind` as in ``Failure``."""

    rank: int | None  # None: the launcher
    kind: str
    sentence: str


class RunFields(TypedDict, total=False):
    """What is known of a run; each task writes the fields that it has."""

    status: str  # a ``Status``
    error: RunError | None
    task: str
    tags: Sequence[str]
    notes: str | None
    sweep: str | None  # the name of the sweep's folder; None: a run of its own
    # started_at of the session whose state has been restored, its resume_step (None: it began
    # anew), and its clock, the time.time() of the run's second 0: metrics.jsonl is its own.
    loaded: Mapping[str, float | None]
    # The command's words that name the user's config folders; None: another launcher started it.
    own_groups: Sequence[str] | None
    config_hash: str
    work_hash: str  # of the keys that decide what is computed
    git_revision: str | None
    versions: Mapping[str, str | None]
    host: str  # of rank 0
    hosts: Sequence[str]  # of all ranks, each once
    world_size: int
    num_nodes: int
    parallelism: str | None
    backend: str
    devices: Sequence[str]  # of rank 0
    num_devices: int
    num_threads: int
    restarts: int
    warnings: Sequence[str]
    launches: Sequence[str]  # see ``own_launch_ids``
    parallel_jobs: bool  # ran as a parallel job of a sweep
    cores: Sequence[int]
    visible_gpus: Mapping[str, str]
    trains_on_stream: bool  # its steps depend on the number of ranks
    uses: Sequence[str]  # the groups that a loop of the user's own builds from
    model_arguments: Mapping[str, Any]  # facts of the data that the model was built with
    export_sha256: str  # of model.safetensors
    of_run: str  # of an evaluation, a prediction or an export: the folder of the run
    weights_step: int  # the step of the weights that it took
    split: str
    predictions: str  # the name of the file
    num_parameters: int
    gradient_bytes: int
    epoch: int
    step: int
    first_loss: float | None
    metrics: Mapping[str, float | None]  # the last ones; of a model that is exported its own
    exported_step: int  # of that model: the best by checkpoint.monitor, or the last
    directions: Mapping[str, str]  # of the user's own metrics, eval/NAME: max or min is best
    confusion_matrix: Sequence[Sequence[int]]
    load: Mapping[str, Mapping[str, float | None]]
    peak_memory_gib_by_rank: Sequence[float] | None  # of the last session; see docs/profiling.md
    skew_ms_by_rank: Sequence[float] | None  # of the last session; see docs/where_time_goes.md
    skew_step_ms: float | None  # the mean of the steps in which it was measured
    flops_per_sample: float | None  # of a forward and backward; None: they cannot be counted
    matmul_flops_per_s: float | None  # of all ranks
    stopped_early: str | None  # why the run ended before its last step; None: it did not
    checks: Sequence[Mapping[str, Any]]  # task=check
    collectives: Sequence[Mapping[str, Any]]  # task=collectives
    not_in_backend: Sequence[Mapping[str, Any]]


class RunRecord(RunFields, total=False):
    """All fields of run.json; the functions below keep the times."""

    sessions: Sequence[SessionTimes]
    started_at: float  # of the first session, as is the next one
    startup_s: float | None
    wall_s: float | None  # of all sessions, without the pauses between them
    finished_at: float | None


def read_run_record(run_dir: os.PathLike[str], *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the fields of run.json, unchecked: another version may have written it.

    Raises:
        UserError: it is not a JSON object, or there is none and `missing_ok` is False.
    """
    path = Path(run_dir, RUN_RECORD)
    if missing_ok and not path.exists():
        return {}
    with os_errors(f"{path} cannot be read", fix="name the folder of a run"):
        content = read_file(path)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore or delete it") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} does not hold a JSON object; restore or delete it")
    return fields


def write_run_record(run_dir: os.PathLike[str], **fields: Unpack[RunRecord]) -> None:
    """Merge fields into run.json, which is replaced whole: a reader sees the old one or the new.

    The times of the run follow from those of its sessions.

    Raises:
        UserError: the existing run.json is damaged, or the new one cannot be written.
    """
    if sessions := fields.get("sessions"):
        walls = [one["wall_s"] for one in sessions if one["wall_s"] is not None]
        fields["started_at"] = sessions[0]["started_at"]
        fields["startup_s"] = sessions[0]["startup_s"]
        fields["wall_s"] = round(sum(walls), 3) if len(walls) == len(sessions) else None
    path = Path(run_dir, RUN_RECORD)
    with os_errors(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            record = {**read_run_record(run_dir, missing_ok=True), **fields}
            replace_file(path, json.dumps(json_safe(record), indent=2, allow_nan=False) + "\n")
        finally:
            os.close(folder)


def add_warning(run_dir: os.PathLike[str], sentence: str) -> None:
    """Add a warning to those of run.json; it raises what ``write_run_record`` does."""
    known = read_run_record(run_dir, missing_ok=True).get("warnings") or ()
    write_run_record(run_dir, warnings=[*known, sentence])


def has_begun(record: Mapping[str, Any]) -> bool:
    """Return whether a run has reached its first step, in any of its sessions."""
    return record.get("startup_s") is not None


def begin_session(
    run_dir: os.PathLike[str],
    *,
    started_at: float,
    finished_at: float | None = None,
    **fields: Unpack[RunFields],
) -> None:
    """Record that a session began; `started_at` identifies it, so a second call changes no time.

    An earlier session that failed ended when its failure was recorded. If it was killed, take the
    last write to metrics.jsonl, or else to run.json, as its end.

    Raises:
        UserError: run.json is damaged, has other fields, or cannot be written.
    """
    known = read_run_record(run_dir, missing_ok=True)
    try:
        sessions = _sessions(known)
        if not sessions or sessions[-1]["started_at"] != started_at:
            if sessions and sessions[-1]["wall_s"] is None:
                files = RunDir(Path(run_dir))
                written = files.metrics if files.metrics.exists() else files.record
                ended_at = known.get("finished_at") or written.stat().st_mtime
                sessions[-1]["wall_s"] = _seconds(sessions[-1], ended_at)
            sum((one["wall_s"] or 0.0) + (one["startup_s"] or 0.0) for one in sessions)
            sessions.append({"started_at": started_at, "startup_s": None, "wall_s": None})
        write_run_record(run_dir, sessions=sessions, finished_at=finished_at, **fields)
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{Path(run_dir, RUN_RECORD)} has times that no run writes ({typed(error)}); restore "
            "or delete it"
        ) from error


def last_session_start(record: Mapping[str, Any]) -> Any:
    """Return when the last session began, as a record that anybody may have written tells it."""
    sessions = record.get("sessions")
    last = sessions[-1] if isinstance(sessions, list) and sessions else record
    return last.get("started_at") if isinstance(last, Mapping) else None


def fail_session(run_dir: os.PathLike[str], *, started_at: float, error: RunError) -> None:
    """Record why a session failed.

    A mistake that ended a resume before the state was restored leaves run.json as it was.

    Raises:
        UserError: run.json is damaged, or cannot be written.
    """
    known = read_run_record(run_dir, missing_ok=True)
    is_open = last_session_start(known) == started_at
    if not is_open and has_begun(known) and error["kind"] == "user":
        return
    failed, now = Status.FAILED, time.time()
    begin_session(run_dir, started_at=started_at, finished_at=now, status=failed, error=error)


def begin_anew(run_dir: os.PathLike[str]) -> None:
    """Forget the earlier sessions: this one starts at step 0, without their metrics."""
    write_run_record(run_dir, sessions=_sessions(read_run_record(run_dir))[-1:])


def note_startup(run_dir: os.PathLike[str]) -> None:
    """Record that this session's start-up ends now."""
    sessions = _sessions(read_run_record(run_dir))
    sessions[-1]["startup_s"] = _seconds(sessions[-1], time.time())
    write_run_record(run_dir, sessions=sessions)


def end_session(run_dir: os.PathLike[str], **fields: Unpack[RunFields]) -> None:
    """Record that this session ends now, with further fields of run.json."""
    finished_at, sessions = time.time(), _sessions(read_run_record(run_dir))
    sessions[-1]["wall_s"] = _seconds(sessions[-1], finished_at)
    write_run_record(run_dir, sessions=sessions, finished_at=finished_at, **fields)


def _sessions(record: Mapping[str, Any]) -> list[SessionTimes]:
    sessions: list[SessionTimes] = record.get("sessions", [])
    return sessions


def _seconds(session: SessionTimes, until: float) -> float:
    return round(max(0.0, until - session["started_at"]), 3)
