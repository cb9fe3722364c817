"""Run folders as they were left: found below paths and read; one that cannot be used says why.

Reads run.json, metrics.jsonl and .hydra/config.yaml, nothing else.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ddp_runner.compare.run import Run, is_finite
from ddp_runner.config.moved import with_moved_names
from ddp_runner.config.schema import leaves
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import CONFIG_FILE, METRICS_FILE, RUN_RECORD, SUBFOLDERS
from ddp_runner.tracking.run_record import RunRecord, read_run_record

NEEDED: dict[str, type] = {"config_hash": str, "world_size": int, "metrics": dict}
KNOWN_FIELDS = {*get_type_hints(RunRecord), "launch_id", "agents"}  # the last two are of old runs
# PyYAML's own parser takes ten times as long as libyaml, which most builds of it carry.
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in and below folders, each once even where the paths overlap.

    A copy of a run folder, known by its config hash and the instant of its last start, counts once
    too.

    Raises:
        UserError: there is no run in or below one of the paths.
    """
    runs: dict[Path, Run] = {}
    seen: set[tuple[str, float]] = set()
    for path in paths:
        folders = sorted(_run_folders(path))
        if not folders:
            raise UserError(
                f"{path} holds no run (a folder with a {RUN_RECORD}); name a run's folder, a "
                "sweep's, or outputs"
            )
        for folder in folders:
            place = folder.resolve()
            if place in runs:
                continue
            run = read_run(folder)
            started_at = [run.record, *run.sessions][-1].get("started_at")
            if is_finite(started_at) and "config_hash" in run.record:
                identity = (str(run.record["config_hash"]), started_at)
                if identity in seen:
                    continue
                seen.add(identity)
            runs[place] = run
    return list(runs.values())


def read_run(folder: Path) -> Run:
    """Return one run; one that is damaged, not completed or of another format has a reason."""
    if folder.is_dir() and not (folder / RUN_RECORD).exists():
        return Run(folder, reason=f"there is no {RUN_RECORD}: it never began, or is a partial copy")
    record: Mapping[str, Any] = {}
    try:
        record = read_run_record(folder)
        if (reason := _unfinished(folder, record) or _unusable(record)) is not None:
            return Run(folder, reason=reason, record=record)
        config = yaml.load((folder / CONFIG_FILE).read_bytes(), Loader=LOADER)  # a safe one
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
        keys = dict(leaves(with_moved_names(config)))
        lines, num_damaged = _read_lines(folder / METRICS_FILE)
    except Exception as error:  # of any kind, as PyYAML makes of odd tags
        return Run(folder, reason=_sentence(folder, error, record), record=record)
    notes = [_foreign(record)] if _foreign(record) else []
    if num_damaged:
        num_lines = num_damaged + len(lines)
        notes.append(f"{num_damaged} of {num_lines} lines of {METRICS_FILE} are damaged, left out")
    return Run(folder, notes=tuple(notes), record=record, config=keys, lines=tuple(lines))


def _run_folders(path: Path) -> Iterator[Path]:
    """Yield the folders that are, or were to be, runs, and those that cannot be looked into."""
    unreadable: list[Path] = []
    walk = os.walk(path, onerror=lambda error: unreadable.append(Path(error.filename)))
    for name, subfolders, files in walk:
        folder = Path(name)
        if RUN_RECORD in files or METRICS_FILE in files or (folder / CONFIG_FILE).exists():
            subfolders[:] = set(subfolders) - set(SUBFOLDERS)
            yield folder
    yield from (folder for folder in unreadable if path.is_dir() and folder.is_dir())


def _unfinished(folder: Path, record: Mapping[str, Any]) -> str | None:
    """Return why a run that has not been completed is not compared; None: it has been."""
    status, error = record.get("status"), record.get("error")
    sentence = error.get("sentence") if isinstance(error, dict) else None
    if status == Status.COMPLETED:
        return None
    if status == Status.RUNNING:
        lines = folder / METRICS_FILE
        written = (lines if lines.exists() else folder / RUN_RECORD).stat().st_mtime
        minutes = max(0, int(time.time() - written) // 60)
        age = "in the last minute" if minutes == 0 else f"{minutes} min ago"
        return f"still running, or killed without a word; it last wrote {age}"
    if status in (Status.FAILED, Status.PREEMPTED):
        return f"{status}: {sentence or 'at step ' + str(record.get('step', 0))}"
    return f"{RUN_RECORD} is of another format: status is {_brief(status)}"


def _unusable(record: Mapping[str, Any]) -> str | None:
    if "checks" in record:
        return "a task=check has no metrics to compare"
    for name, kind in NEEDED.items():
        value = record.get(name)
        if not isinstance(value, kind) or (isinstance(value, int) and value < 1):
            found = f"{name} is {_brief(value)}, expected {kind.__name__}"
            return f"{RUN_RECORD} is of another format: {found}"
    return None


def _sentence(folder: Path, error: Exception, record: Mapping[str, Any]) -> str:
    if isinstance(error, UserError):
        return str(error).replace(f"{folder}{os.sep}", "")  # alike for all runs with this fault
    if isinstance(error, OSError):
        return f"{Path(error.filename).name} cannot be read ({error.strerror})"
    name = CONFIG_FILE if record else RUN_RECORD
    return f"{name} cannot be read ({' '.join(str(error).split())})"


def _foreign(record: Mapping[str, Any]) -> str:
    """Return how the program that wrote a record differs from this one; empty: it does not."""
    versions = record.get("versions")
    theirs = versions.get("ddp_runner") if isinstance(versions, dict) else None
    if theirs == _version():
        return ""
    unknown = ", ".join(sorted(set(record) - KNOWN_FIELDS))
    fields = f"; unknown here: {unknown}" if unknown else ""
    return f"written by ddp_runner {theirs or '(not said)'}, this is {_version()}{fields}"


@cache
def _version() -> str:
    return metadata.version("ddp_runner")


def _read_lines(path: Path) -> tuple[list[dict[str, float | None]], int]:
    """Return the whole lines of a file of metrics, and how many there are that are not."""
    lines: list[dict[str, float | None]] = []
    num_damaged = 0
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            if not (is_finite(line["step"]) and is_finite(line["time_s"])):
                raise ValueError
            lines.append({key: _number(value) for key, value in line.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            num_damaged += 1
    return lines, num_damaged


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, int | float):
        return value if is_finite(value) else None
    raise ValueError


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
