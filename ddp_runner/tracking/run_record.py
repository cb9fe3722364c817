"""run.json and what goes into it: the one file of a run that launcher and rank 0 both write.

Imports no torch, because the launcher calls it before torch is needed.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError
from ddp_runner.files import json_safe, replace_file

RUN_RECORD = "run.json"
GIT_TIMEOUT_S = 2.0
PACKAGES = (
    "ddp_runner",
    "torch",
    "torchvision",
    "hydra-core",
    "omegaconf",
    "tensorboard",
)


def read_run_record(run_dir: Path) -> dict[str, Any]:
    """Returns the fields of a run's run.json.

    Raises:
        UserError: There is none, or it is not a JSON object.
    """
    path = run_dir / RUN_RECORD
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


def write_run_record(run_dir: Path, **fields: Any) -> None:
    """Merges fields into run.json, which is replaced whole: a reader sees the old one or the new.

    Launcher and rank 0 may call it at once: a lock on the folder keeps both their fields.

    Raises:
        UserError: The existing run.json is damaged, or the new one could not be written.
    """
    _write(run_dir, lambda known: known | fields)


def replace_run_record(run_dir: Path, fields: Mapping[str, Any]) -> None:
    """Puts these fields into run.json in place of all that it holds.

    Raises:
        UserError: It could not be written.
    """
    _write(run_dir, lambda known: dict(fields))


def _write(run_dir: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder_descriptor = os.open(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(folder_descriptor, fcntl.LOCK_EX)
            known = read_run_record(run_dir) if (run_dir / RUN_RECORD).exists() else {}
            text = json.dumps(json_safe(changed(known)), indent=2, allow_nan=False)
            replace_file(run_dir / RUN_RECORD, text + "\n")
        finally:
            os.close(folder_descriptor)
    except OSError as error:
        raise UserError(
            f"{run_dir / RUN_RECORD} cannot be written ({error.strerror}); "
            "free space or make the folder writable"
        ) from error


def git_revision() -> str | None:
    """Returns the commit of the current folder, with ``+dirty`` where tracked files differ from it.

    None outside a git repository, without git, or where git takes longer than 2 s.
    """
    # Excluding every tag makes describe answer with the full hash: one process tells both facts.
    command = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40"]
    try:
        answer = subprocess.run(
            [*command, "--exclude=*", "--dirty=+dirty"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Returns the installed version of Python and of each package, None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
