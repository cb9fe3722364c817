"""The outputs folder: how runs and sweeps are named in it, claimed, and found again. Torch-free."""

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
    """Return the path of a new single run, not yet claimed; `config` is resolved."""
    groups = [config.model, config.dataset, config.parallelism]
    if has_own_loop(config.task):
        groups = groups[2:]  # who knows which of the others it builds from
    parts = [group.get("name", "custom") for group in groups]
    if config.task == "collectives":
        parts = [config.backend.name]
    if config.task != "train":
        parts = [config.task, *parts]
    name = config.name or f"{'-'.join(parts)}-ws{config.world_size}"
    return OUTPUTS / safe_name(name) / timestamp()


def sweep_folder(name: str | None) -> Path:
    """Return the path of a new sweep, not yet claimed."""
    return OUTPUTS / f"{safe_name(name or 'sweep')}-{timestamp()}"


def job_name(overrides: Sequence[str]) -> str:
    """Return a sweep job's folder: the overrides that the sweep varies, in their order.

    A search draws numbers of 17 digits: long ones are rounded to four.
    """
    long_number = re.compile(r"(?<==)-?\d+\.\d{5,}(e[+-]?\d+)?$")
    short = (long_number.sub(lambda found: f"{float(found[0]):.4g}", one) for one in overrides)
    return safe_name(",".join(short) or "job")


def timestamp() -> str:
    """Return the local time as a folder name that sorts."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def claim(path: Path) -> Path:
    """Create a new folder and return it: `path`, or `path-2`, … if that exists.

    Raises:
        UserError: the folder cannot be written, or the disk is nearly full.
    """
    fix = "start in a folder that you may write to, or give hydra.run.dir=FOLDER"
    with os_errors(f"the run folder {path} cannot be created", fix=fix):
        # Before anything is created, so that an error leaves nothing behind.
        ensure_space(path, place=next(one for one in path.parents if one.is_dir()))
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
            with suppress(FileExistsError):
                candidate.mkdir()
                break
    return candidate


def sibling_runs(config: RunConfig, *, names_others: bool = False) -> list[RunDir]:
    """Return the user's runs whose names fit this config, of any world size, newest first."""
    planned = run_folder(config)
    pattern = glob.escape(planned.parent.name)
    if config.name is None:
        pattern = re.sub(r"-ws\d+$", "-ws*", pattern)
    found = _own(OUTPUTS.glob(f"{pattern}/*/{RUN_RECORD}"), is_named=names_others)
    folders = sorted((path.parent for path in found), key=lambda path: path.name, reverse=True)
    return [RunDir(folder) for folder in folders]


def newest_run() -> Path | None:
    """Return the user's run below the outputs folder that was written last, also one of a sweep.

    A run without a model of its own, such as an evaluation, does not count: it is the run itself
    that is resumed, or evaluated.
    """
    found = [*OUTPUTS.glob(f"*/{RUN_RECORD}"), *OUTPUTS.glob(f"*/*/{RUN_RECORD}")]
    for path in sorted(_own(found), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(UserError):  # a damaged run.json says nothing
            if read_run_record(path.parent).get("task") in WITHOUT_MODEL:
                continue
        return path.parent
    return None


def _own(records: Iterable[Path], *, is_named: bool = True) -> list[Path]:
    """Return the run.json files of this user; print which others are passed over.

    Outputs may be a folder that everybody writes to, and nobody has named these runs.
    """
    found, others = list[Path](), list[str]()
    for path in records:
        with suppress(OSError):  # it has just gone
            is_own = {path.stat().st_uid, path.parent.stat().st_uid} == {os.geteuid()}
            found.append(path) if is_own else others.append(str(path.parent))
    if others and is_named and prints_errors():
        why = "not this user's, and passed over; if you trust it, give resume=RUN"
        print_line(printable(f"{listed(sorted(others))}: {why}"), stream=sys.stderr)
    return found
