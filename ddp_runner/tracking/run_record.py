"""run.json: its fields, and how launcher and rank 0 both write it. Torch-free."""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ddp_runner.errors import UserError
from ddp_runner.files import json_safe, replace_file
from ddp_runner.tracking.run_dir import RunDir

GIT_TIMEOUT_S = 2.0
PACKAGES = (
    "ddp_runner",
    "torch",
    "torchvision",
    "hydra-core",
    "omegaconf",
    "tensorboard",
)


class SessionTimes(TypedDict):
    """The times of one session of a run, from a start to its end."""

    started_at: float  # seconds since the epoch
    startup_s: float | None  # None: it has not reached its first step
    wall_s: float | None  # None: it has not ended


class RunTimes(TypedDict, total=False):
    """The times of a run, which ``times`` keeps; `started_at` and `startup_s` are of the first."""

    started_at: float
    startup_s: float | None
    wall_s: float | None  # of all sessions
    sessions: Sequence[SessionTimes]
    finished_at: float | None


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
    config_hash: str
    work_hash: str  # of the keys that decide what is computed
    git_revision: str | None
    versions: Mapping[str, str | None]
    host: str
    world_size: int
    num_nodes: int
    parallelism: str | None
    backend: str
    devices: Sequence[str]  # of rank 0
    num_devices: int
    num_threads: int
    restarts: int
    warnings: Sequence[str]
    launches: Sequence[str]  # see ``launch_marks``
    parallel_jobs: bool  # ran as a parallel job of a sweep
    cores: Sequence[int]
    cuda_visible_devices: str | None
    num_parameters: int
    gradient_bytes: int
    epoch: int
    step: int
    first_loss: float | None
    metrics: Mapping[str, float | None]
    confusion_matrix: Sequence[Sequence[int]]
    load: Mapping[str, Mapping[str, float | None]]
    lost_ranks: Sequence[int]
    checks: Sequence[Mapping[str, Any]]  # task=check
    collectives: Sequence[Mapping[str, Any]]  # task=collectives
    not_in_backend: Sequence[Mapping[str, Any]]


class RunRecord(RunFields, RunTimes, total=False):
    """All fields of run.json."""


def read_run_record(run_dir: os.PathLike[str], *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the fields of run.json, unchecked: another version may have written it.

    Args:
        run_dir: the run's folder.
        missing_ok: return no fields if there is no run.json.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    path = RunDir(Path(run_dir)).record
    if missing_ok and not path.exists():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); name the folder of a run"
        ) from error
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
    _write(run_dir, lambda known: {**known, **fields})


def replace_run_record(run_dir: os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write these fields into run.json, and no others.

    Raises:
        UserError: it cannot be written.
    """
    _write(run_dir, lambda known: dict(fields))


def _write(run_dir: os.PathLike[str], changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    folder, path = Path(run_dir), RunDir(Path(run_dir)).record
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(folder_descriptor, fcntl.LOCK_EX)
            known = read_run_record(folder, missing_ok=True)
            text = json.dumps(json_safe(changed(known)), indent=2, allow_nan=False)
            replace_file(path, text + "\n")
        finally:
            os.close(folder_descriptor)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); free space or make the folder writable"
        ) from error


def git_revision() -> str | None:
    """Return the commit of the current folder, with ``+dirty`` if tracked files differ from it.

    None outside a git repository, without git, or if git takes longer than 2 s.
    """
    # Excluding every tag makes describe print the full hash: one call returns both facts.
    command = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40"]
    try:
        result = subprocess.run(
            [*command, "--exclude=*", "--dirty=+dirty"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Return the installed version of Python and of each package; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
