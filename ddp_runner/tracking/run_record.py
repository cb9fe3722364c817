"""run.json: its fields, the times of a run's sessions, and the versions of packages. Torch-free.

A session lasts from a start of the run to its end. The launcher and rank 0 write the file in turns;
on several machines all launchers may write at the end, so a lock on the folder keeps every field.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ddp_runner import __version__
from ddp_runner.errors import UserError, any_error, os_errors, typed
from ddp_runner.files import json_safe, locked, read_file, read_or_none, replace_file
from ddp_runner.job import FailureKind, Status
from ddp_runner.tracking.run_dir import RUN_RECORD, RunDir

RESTORE = "restore it from a copy, or delete it and lose the times of earlier sessions"
PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard")


class SessionTimes(TypedDict):
    """The times of one session."""

    started_at: float  # time.time() at the start of the command or of the sweep's job
    startup_s: float | None  # seconds until the first step; None: not reached
    wall_s: float | None  # seconds until the end; None: not ended


class RunError(TypedDict):
    """Why a run failed; see ``Failure``."""

    rank: int | None
    kind: FailureKind
    sentence: str


class RunFields(TypedDict, total=False):
    """Facts of a run. Each task writes only its own fields."""

    status: Status
    error: RunError | None
    task: str
    tags: Sequence[str]
    notes: str | None
    sweep: str | None  # name of the sweep's folder; None: a single run
    # Written once the session has restored its state and cut metrics.jsonl: its started_at, its
    # resume_step (None: it starts at step 0) and its clock, the time.time() of the run's second 0.
    loaded: Mapping[str, float | None]
    own_groups: Sequence[str] | None  # see ``CommandLine``; None: another launcher's ranks
    config_hash: str
    work_hash: str  # hash of the keys that decide the results
    git_revision: str | None  # commit of the current folder; see ``git_revisions``
    runner_revision: str | None  # commit of ddp_runner; None: it is in the same repository, or none
    code_diff: str | None  # file with the changes that no commit has; its name follows from them
    versions: Mapping[str, str | None]
    host: str  # host of rank 0
    hosts: Sequence[str]  # distinct hosts of all ranks
    world_size: int
    num_nodes: int
    parallelism: str | None
    backend: str
    devices: Sequence[str]  # devices of rank 0
    num_devices: int
    num_threads: int
    restarts: int
    warnings: Sequence[str]
    launches: Sequence[str]  # see ``own_launch_ids``
    parallel_jobs: bool  # the run was a parallel job of a sweep
    cores: Sequence[int]
    visible_gpus: Mapping[str, str]
    trains_on_stream: bool  # the samples of a step depend on the number of ranks
    uses: Sequence[str]  # config groups that a user's own loop builds from
    model_arguments: Mapping[str, Any]  # model arguments that came from the dataset
    export_sha256: str  # checksum of model.safetensors
    weights_sha256: str  # of the weights after the last step: equal for equal bytes
    of_run: str  # folder of the run whose model was evaluated, exported or used to predict
    weights_step: int  # step of that run's weights
    split: str
    predictions: str  # name of the file with the predictions
    num_parameters: int
    gradient_bytes: int
    epoch: int
    step: int
    first_loss: float | None
    metrics: Mapping[str, float | None]  # last values; at exported_step where it has them
    exported_step: int  # step of the exported model: best by checkpoint.monitor, or last
    directions: Mapping[str, str]  # whether max or min is best, for the user's eval/NAME metrics
    confusion_matrix: Sequence[Sequence[int]]
    load: Mapping[str, Mapping[str, float | None]]
    peak_memory_gib_by_rank: Sequence[float] | None  # last session; see docs/where_time_goes.md
    skew_ms_by_rank: Sequence[float] | None  # last session; see docs/where_time_goes.md
    skew_step_ms: float | None  # mean time of the steps where skew was measured
    flops_per_sample: float | None  # one forward and backward; None: cannot be counted
    matmul_flops_per_s: float | None  # sum over all ranks
    changes: Sequence[str]  # what resumes changed, such as "optimizer.lr=0.1 (was 0.2) at step 40"
    stopped_early: str | None  # why the run ended before its last step; None: it did not
    checks: Sequence[Mapping[str, Any]]  # task=check
    collectives: Sequence[Mapping[str, Any]]  # task=collectives
    not_in_backend: Sequence[Mapping[str, Any]]
    planned_collectives: Sequence[Mapping[str, Any]]  # task=plan, of a step of a rank
    verdict: str | None  # task=plan: whether a rank fits its GPU


class RunRecord(RunFields, total=False):
    """All fields of run.json. The functions below maintain the times."""

    sessions: Sequence[SessionTimes]
    started_at: float  # first session
    startup_s: float | None  # first session
    wall_s: float | None  # sum over all sessions, without the pauses between them
    finished_at: float | None


def read_run_record(run_dir: os.PathLike[str], *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the fields of run.json, unchecked: another version may have written it.

    Raises:
        UserError: run.json is not a JSON object, or it is missing and `missing_ok` is False.
    """
    path = Path(run_dir, RUN_RECORD)
    if missing_ok and not path.exists():
        return {}
    with os_errors(f"{path} cannot be read", fix="name the folder of a run"):
        content = read_file(path)
    with any_error(f"{path} is not valid JSON", RESTORE):
        fields = json.loads(content)
    if not isinstance(fields, dict):
        raise UserError(f"{path} does not hold a JSON object", RESTORE)
    return fields


def intact_record(run_dir: os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of run.json; {} if it is missing or damaged."""
    return read_or_none(read_run_record, Path(run_dir)) or {}


def write_run_record(run_dir: os.PathLike[str], **fields: Unpack[RunRecord]) -> None:
    """Merge fields into run.json, and update the run's times from its sessions.

    The file is replaced atomically: a reader sees either the old or the new one.

    Raises:
        UserError: the existing run.json is damaged, or the new one cannot be written.
    """
    if sessions := fields.get("sessions"):
        walls = [times["wall_s"] for times in sessions if times["wall_s"] is not None]
        fields["started_at"] = sessions[0]["started_at"]
        fields["startup_s"] = sessions[0]["startup_s"]
        fields["wall_s"] = round(sum(walls), 3) if len(walls) == len(sessions) else None
    path = Path(run_dir, RUN_RECORD)
    with os_errors(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            record = {**read_run_record(run_dir, missing_ok=True), **fields}
            replace_file(path, json.dumps(json_safe(record), indent=2, allow_nan=False) + "\n")


def add_warning(run_dir: os.PathLike[str], sentence: str) -> None:
    """Append a warning to run.json; see ``write_run_record`` for errors."""
    warnings = read_run_record(run_dir, missing_ok=True).get("warnings") or ()
    write_run_record(run_dir, warnings=[*warnings, sentence])


def add_changes(run_dir: os.PathLike[str], changes: Sequence[str], *, step: int) -> None:
    """Append what a resume at this step changed to run.json; see ``write_run_record``."""
    earlier = read_run_record(run_dir, missing_ok=True).get("changes") or ()
    new = [f"{change} at step {step}" for change in changes]
    write_run_record(run_dir, changes=[*earlier, *new])


def has_taken_step(record: Mapping[str, Any]) -> bool:
    """Return whether a run has reached its first step in any session."""
    return record.get("startup_s") is not None


def start_session(
    run_dir: os.PathLike[str],
    *,
    started_at: float,
    finished_at: float | None = None,
    **fields: Unpack[RunFields],
) -> None:
    """Record the start of a session; `started_at` identifies it, so a second call adds nothing.

    An earlier session without an end was killed, unless its failure was recorded: take the last
    write to metrics.jsonl, or else to run.json, as its end.

    Raises:
        UserError: run.json is damaged, has fields of other types, or cannot be written.
    """
    record = read_run_record(run_dir, missing_ok=True)
    try:
        sessions: list[SessionTimes] = record.get("sessions", [])
        if not sessions or sessions[-1]["started_at"] != started_at:
            if sessions and sessions[-1]["wall_s"] is None:
                files = RunDir(Path(run_dir))
                last_written = files.metrics if files.metrics.exists() else files.record
                ended_at = record.get("finished_at") or last_written.stat().st_mtime
                sessions[-1]["wall_s"] = _seconds(sessions[-1], ended_at)
            # A TypeError here, before the write, if a value is not a number.
            sum((times["wall_s"] or 0.0) + (times["startup_s"] or 0.0) for times in sessions)
            sessions.append({"started_at": started_at, "startup_s": None, "wall_s": None})
        write_run_record(run_dir, sessions=sessions, finished_at=finished_at, **fields)
    except (LookupError, TypeError, AttributeError) as error:  # anyone may have edited the file
        rule = f"{Path(run_dir, RUN_RECORD)} has invalid times ({typed(error)})"
        raise UserError(rule, RESTORE) from error


def last_session_start(record: Mapping[str, Any]) -> Any:
    """Return the start of the last session from an unchecked record; None: unknown."""
    sessions = record.get("sessions")
    last = sessions[-1] if isinstance(sessions, list) and sessions else record
    return last.get("started_at") if isinstance(last, Mapping) else None


def fail_session(run_dir: os.PathLike[str], *, started_at: float, error: RunError) -> bool:
    """Record why a session failed, and return whether it was one of the run's sessions.

    A resume with a user's mistake is none until it has restored the state: the run stays as it was.

    Raises:
        UserError: run.json is damaged, or cannot be written.
    """
    record = read_run_record(run_dir, missing_ok=True)
    is_new = last_session_start(record) != started_at
    if is_new and has_taken_step(record) and error["kind"] == "user":
        return False
    failed, now = Status.FAILED, time.time()
    start_session(run_dir, started_at=started_at, finished_at=now, status=failed, error=error)
    return True


def forget_earlier_sessions(run_dir: os.PathLike[str]) -> None:
    """Remove earlier sessions from run.json: this one starts at step 0 without their metrics."""
    write_run_record(run_dir, sessions=read_run_record(run_dir).get("sessions", [])[-1:])


def note_startup(run_dir: os.PathLike[str]) -> None:
    """Record the end of this session's start-up."""
    sessions = read_run_record(run_dir)["sessions"]
    sessions[-1]["startup_s"] = _seconds(sessions[-1], time.time())
    write_run_record(run_dir, sessions=sessions)


def end_session(run_dir: os.PathLike[str], **fields: Unpack[RunFields]) -> None:
    """Record the end of this session, with further fields of run.json."""
    finished_at, sessions = time.time(), read_run_record(run_dir)["sessions"]
    sessions[-1]["wall_s"] = _seconds(sessions[-1], finished_at)
    write_run_record(run_dir, sessions=sessions, finished_at=finished_at, **fields)


def _seconds(session: SessionTimes, until: float) -> float:
    return round(max(0.0, until - session["started_at"]), 3)


def versions() -> dict[str, str | None]:
    """Return the versions of Python, ddp_runner and the packages that decide the results."""
    from importlib import metadata  # late: a mistake is answered without it

    return {
        "python": platform.python_version(),
        "ddp_runner": __version__,
        **{package: metadata.version(package) for package in PACKAGES},
    }
