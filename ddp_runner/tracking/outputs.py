"""The outputs folder: names, creates and finds the folders of runs and sweeps. Torch-free."""

import glob
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_runner.config.schema import RunConfig, has_own_loop
from ddp_runner.config.sections import WITHOUT_MODEL
from ddp_runner.dist_env import prints_errors
from ddp_runner.errors import UserError, listed, os_errors, printable
from ddp_runner.files import safe_name
from ddp_runner.host.streams import print_line
from ddp_runner.tracking.run_dir import RUN_RECORD, RunDir, ensure_space
from ddp_runner.tracking.run_record import read_run_record

OUTPUTS = Path("outputs")


def run_folder(config: RunConfig) -> Path:
    """Return the path for a new single run of a resolved config; create nothing."""
    groups = [config.model, config.dataset, config.parallelism]
    if has_own_loop(config.task):
        groups = groups[2:]  # the loop may ignore model and dataset
    parts = [group.get("name", "custom") for group in groups]
    if config.task == "collectives":
        parts = [config.backend.name]
    if config.task != "train":
        parts = [config.task, *parts]
    name = config.name or f"{'-'.join(parts)}-ws{config.world_size}"
    return OUTPUTS / safe_name(name) / timestamp()


def sweep_folder(name: str | None) -> Path:
    """Return the path for a new sweep; create nothing."""
    return OUTPUTS / f"{safe_name(name or 'sweep')}-{timestamp()}"


def job_name(overrides: Sequence[str]) -> str:
    """Return the folder name of a sweep job: the overrides that the sweep varies, in order.

    Round numbers with five or more decimals to four digits: a search draws numbers of 17 digits.
    """
    long_number = re.compile(r"(?<==)-?\d+\.\d{5,}(e[+-]?\d+)?$")
    name = ",".join(
        long_number.sub(lambda match: f"{float(match[0]):.4g}", override) for override in overrides
    )
    return safe_name(name or "job")


def timestamp() -> str:
    """Return the local time as a folder name that sorts."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def claim(path: Path) -> Path:
    """Create and return a new folder: `path`, or `path-2`, … if it exists.

    Raises:
        UserError: the folder cannot be written, or the disk is nearly full.
    """
    fix = "start in a folder that you may write to, or give hydra.run.dir=FOLDER"
    with os_errors(f"the run folder {path} cannot be created", fix=fix):
        # Check first, so that an error leaves no folder behind.
        ensure_space(path, existing=next(parent for parent in path.parents if parent.is_dir()))
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
            with suppress(FileExistsError):  # an equal command started in the same second
                candidate.mkdir()
                break
    return candidate


def sibling_runs(config: RunConfig, *, names_others: bool = False) -> list[RunDir]:
    """Return this user's runs with this config's name and any world size, newest first.

    With `names_others` print which runs of other users are skipped.
    """
    planned = run_folder(config)
    pattern = glob.escape(planned.parent.name)
    if config.name is None:
        pattern = re.sub(r"-ws\d+$", "-ws*", pattern)
    records = _own_records(OUTPUTS.glob(f"{pattern}/*/{RUN_RECORD}"), names_others=names_others)
    folders = sorted((path.parent for path in records), key=lambda path: path.name, reverse=True)
    return [RunDir(folder) for folder in folders]


def newest_run() -> Path:
    """Return this user's most recently written run below outputs/, including runs of sweeps.

    Skip runs without a model of their own, such as evaluations: resume=last means the run itself.

    Raises:
        UserError: there is no such run, or the newest run.json is damaged.
    """
    records = [*OUTPUTS.glob(f"*/{RUN_RECORD}"), *OUTPUTS.glob(f"*/*/{RUN_RECORD}")]
    own_records = _own_records(records, names_others=True)
    for path in sorted(own_records, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if read_run_record(path.parent).get("task") not in WITHOUT_MODEL:
            return path.parent
    raise UserError(
        "resume=last finds no run below outputs",
        "start in the folder that holds it, or give resume=RUN",
    )


def _own_records(records: Iterable[Path], *, names_others: bool) -> list[Path]:
    """Return the run.json files that this user owns: anyone may write to a shared outputs/."""
    own_records, other_runs = list[Path](), list[str]()
    for path in records:
        if {path.stat().st_uid, path.parent.stat().st_uid} == {os.geteuid()}:
            own_records.append(path)
        else:
            other_runs.append(str(path.parent))
    if other_runs and names_others and prints_errors():
        reason = "skipped, since it belongs to another user; if you trust it, give resume=RUN"
        print_line(printable(f"{listed(sorted(other_runs))}: {reason}"), stream=sys.stderr)
    return own_records
