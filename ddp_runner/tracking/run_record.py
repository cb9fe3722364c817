"""run.json: its fields, the times of a run's sessions, and how launcher and rank 0 both write it.

A session lasts from a start of the run to its end. Torch-free.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ddp_runner.errors import UserError, os_errors, typed
from ddp_runner.files import json_safe, read_file, replace_file
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
    """What else is known of a run; each task writes the fields that it has."""

    status: str  # a ``Status``
    error: RunError | None
    task: str
    tags: Sequence[str]
    notes: str | None
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
    launches: Sequence[str]  # see ``claims.own_marks``
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

    started_at: float  # of the first session
    startup_s: float | None  # of the first session
    wall_s: float | None  # of all sessions, without the pauses between them
    sessions: Sequence[SessionTimes]
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

    Launcher and rank 0 may call it at the same time: a lock on the folder keeps both their fields.

    Raises:
        UserError: the existing run.json is damaged, or the new one cannot be written.
    """
    with _rewriting(run_dir) as new:
        new.update({**read_run_record(run_dir, missing_ok=True), **fields})


def replace_run_record(run_dir: os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write these fields into run.json, and no others; the existing one may be damaged.

    Raises:
        UserError: it cannot be written.
    """
    with _rewriting(run_dir) as new:
        new.update(fields)


def add_warning(run_dir: os.PathLike[str], sentence: str) -> None:
    """Add a warning to those of run.json; several threads and processes may do so at once.

    Raises:
        UserError: the existing run.json is damaged, or the new one cannot be written.
    """
    with _rewriting(run_dir) as new:
        new.update(read_run_record(run_dir, missing_ok=True))
        new["warnings"] = [*(new.get("warnings") or ()), sentence]


@contextmanager
def _rewriting(run_dir: os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Write the fields that this block fills in; in the block nobody else writes run.json."""
    path = Path(run_dir, RUN_RECORD)
    with os_errors(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder_descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder_descriptor, fcntl.LOCK_EX)
            fields = dict[str, Any]()
            yield fields
            replace_file(path, json.dumps(json_safe(fields), indent=2, allow_nan=False) + "\n")
        finally:
            os.close(folder_descriptor)


def begin_session(
    run_dir: os.PathLike[str], *, started_at: float, **fields: Unpack[RunFields]
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
        _write_sessions(run_dir, sessions, **fields)
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{Path(run_dir, RUN_RECORD)} has times that no run writes ({typed(error)}); restore "
            "or delete it"
        ) from error


def is_rejected_resume(run_dir: os.PathLike[str], before: Mapping[str, Any]) -> bool:
    """Return whether a run that had begun, by its run.json before, now did not reach a step."""
    sessions = _sessions(read_run_record(run_dir))
    return before.get("startup_s") is not None and sessions[-1]["startup_s"] is None


def begin_anew(run_dir: os.PathLike[str]) -> None:
    """Forget the earlier sessions: this one starts at step 0, without their metrics."""
    _write_sessions(run_dir, _sessions(read_run_record(run_dir))[-1:])


def note_startup(run_dir: os.PathLike[str]) -> None:
    """Record that this session's start-up ends now."""
    sessions = _sessions(read_run_record(run_dir))
    sessions[-1]["startup_s"] = _seconds(sessions[-1], time.time())
    _write_sessions(run_dir, sessions)


def end_session(run_dir: os.PathLike[str], **fields: Unpack[RunFields]) -> None:
    """Record that this session ends now, with further fields of run.json."""
    finished_at, sessions = time.time(), _sessions(read_run_record(run_dir))
    sessions[-1]["wall_s"] = _seconds(sessions[-1], finished_at)
    _write_sessions(run_dir, sessions, finished_at=finished_at, **fields)


def _sessions(record: Mapping[str, Any]) -> list[SessionTimes]:
    sessions: list[SessionTimes] = record.get("sessions", [])
    return sessions


def _write_sessions(
    run_dir: os.PathLike[str],
    sessions: Sequence[SessionTimes],
    *,
    finished_at: float | None = None,
    **fields: Unpack[RunFields],
) -> None:
    """Write the sessions, the times of the whole run and further fields into run.json."""
    walls = [session["wall_s"] for session in sessions]
    known = [wall_s for wall_s in walls if wall_s is not None]
    write_run_record(
        run_dir,
        started_at=sessions[0]["started_at"],
        startup_s=sessions[0]["startup_s"],
        wall_s=None if len(known) < len(walls) else round(sum(known), 3),
        sessions=sessions,
        finished_at=finished_at,
        **fields,
    )


def _seconds(session: SessionTimes, until: float) -> float:
    return round(max(0.0, until - session["started_at"]), 3)
