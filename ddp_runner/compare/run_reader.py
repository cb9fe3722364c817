"""Find run folders below paths and read them: run.json, metrics.jsonl and .hydra/config.yaml.

A run that cannot be compared keeps the files that can be read, and a reason.
"""

import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from ddp_runner import __version__
from ddp_runner.compare.recorded_run import MAX_NUMBER, RecordedRun, best_step, is_finite, nested
from ddp_runner.config.identity import leaves
from ddp_runner.config.sections import WITHOUT_METRICS
from ddp_runner.errors import UserError, duration, listed, one_line
from ddp_runner.files import LOADER, is_missing, json_object, read_file, yaml_text
from ddp_runner.job import Status
from ddp_runner.tracking.alive import LOST, Standing, standing
from ddp_runner.tracking.run_dir import CONFIG_FILE, METRICS_FILE, RUN_RECORD, SUBFOLDERS, RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record

REQUIRED = {"config_hash": str, "world_size": int, "num_devices": int, "metrics": dict}
SIZES = ("world_size", "num_devices")
SHOWN = (  # files in a comparison or a report, and their folders
    *(RUN_RECORD, METRICS_FILE, CONFIG_FILE, ".hydra", ".hydra/overrides.yaml"),
    *("logs", "logs/failure.txt"),
)
# In errors of torch, the kernel, Slurm and Python.
OUT_OF_MEMORY = re.compile(r"(?i)out ?of ?memory|allocate memory|took more memory|MemoryError")


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs in and below folders, each once, even if the paths overlap.

    Copies of a run are left out: runs with equal config hashes and times of the last start.

    Raises:
        UserError: a path contains no run.
    """
    runs: dict[object, RecordedRun] = {}
    for path in paths:
        folders = sorted(_run_folders(path), key=attrgetter("parts"))
        if not folders:
            raise UserError(
                f"{path} contains no run (a folder with a {RUN_RECORD})",
                "give the folder of a run, of a sweep, or outputs",
            )
        for folder in folders:
            run = read_run(folder)
            identity = str(run.record.get("config_hash")), last_session_start(run.record)
            runs.setdefault(identity if is_finite(identity[1]) else folder.resolve(), run)
    return list(runs.values())


def tagged(runs: Sequence[RecordedRun], tags: Sequence[str]) -> list[RecordedRun]:
    """Return the runs that have all of these tags.

    Raises:
        UserError: no run has them.
    """
    chosen = [run for run in runs if set(tags) <= set(run.tags)]
    if tags and not chosen:
        all_tags = sorted({tag for run in runs for tag in run.tags})
        hint = f"the runs have {listed(all_tags) or 'no tags'}"
        raise UserError(f"--tag ({', '.join(tags)}): no run has all of these tags", hint)
    return chosen


def read_run(folder: Path) -> RecordedRun:
    """Return a run; a damaged or incomplete run, or a run of another format, has a reason."""
    reasons: list[str] = []

    def read(name: str, reader: Callable[[Path], Any], nothing: Any) -> Any:
        try:
            return reader(folder / name)
        except Exception as error:  # PyYAML raises errors of any type for odd tags
            if isinstance(error, UserError):  # a sentence; without the folder, the same in all runs
                reasons.append(str(error).replace(f"{folder}{os.sep}", ""))
            else:
                detail = isinstance(error, OSError) and error.strerror
                reasons.append(f"{name} cannot be read ({detail or one_line(error)})")
            return nothing

    if link := read(RUN_RECORD, _link_beside, None):
        reason = f"{link} is a link, which may lead to any file; put the file itself there"
        return RecordedRun(folder, reason=reason)
    record = read(RUN_RECORD, _read_record, {})
    if record.get("status") == Status.RUNNING:
        state = standing(RunDir(folder))
        record = {**(state.record or record), "status": state.status}
        if state.seen_s is not None or state.fault:  # else it has ended since
            reasons.append(state.fault or _sign_of_life(state))
    if not reasons and (problem := _problem(record)):
        reasons.append(problem)
    config = read(CONFIG_FILE, _read_config, {})
    lines, num_damaged = read(METRICS_FILE, read_lines, ([], 0))
    run = RecordedRun(folder, record, config, tuple(lines))
    if reasons:
        return replace(run, reason=reasons[0], ran_out=_ran_out(record) if config else None)
    return replace(run, notes=tuple(_notes(run, num_damaged)))


def _run_folders(path: Path) -> Iterator[Path]:
    """Yield the folders with at least a part of a run, and the folders that cannot be read."""
    unreadable: list[Path] = []

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            unreadable.append(Path(error.filename))

    for name, subfolders, files in os.walk(path, onerror=note):
        folder = Path(name)
        if RUN_RECORD in files or METRICS_FILE in files or not is_missing(folder / CONFIG_FILE):
            subfolders[:] = set(subfolders) - set(SUBFOLDERS)
            yield folder
    yield from unreadable


def _link_beside(record: Path) -> str | None:
    """Return the name of a link among the files of a report; None if there is none."""
    # A folder may come from somebody else, and a report is passed on: a link could lead anywhere.
    folder = record.parent
    return next((name for name in SHOWN if (folder / name).is_symlink()), None)


def _read_record(path: Path) -> dict[str, Any]:
    if is_missing(path) and path.parent.is_dir():
        raise UserError(f"no {RUN_RECORD}: the run never started, or the copy is incomplete")
    return read_run_record(path.parent)


def _read_config(path: Path) -> dict[str, Any]:
    text = yaml_text(path)
    # A frozen config has its keys in blocks, and most are the same in all runs of a sweep.
    blocks = re.split(r"^(?=[^\s#-])", text.removeprefix("---\n").removesuffix("...\n"), flags=re.M)
    try:
        return dict(chain.from_iterable(map(_read_block, filter(None, blocks))))
    except Exception:  # a YAML in another form, or damaged: PyYAML raises errors of any type
        return dict(_read_block(text))


@lru_cache(maxsize=10_000)
def _read_block(text: str) -> list[tuple[str, Any]]:
    """Return the dotted keys of a YAML with their values."""
    config = yaml.load(text, Loader=LOADER)
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping")
    return [*leaves(config, whole_lists=True)]  # lists may differ in length


def read_lines(path: Path) -> tuple[list[dict[str, float | None]], int]:
    """Return the valid lines of a metrics file, and the number of damaged lines."""
    lines: list[dict[str, float | None]] = []
    content = read_file(path) if path.exists() else b""
    with suppress(ValueError, OverflowError, TypeError, RecursionError):  # else line by line
        whole = json.loads(b"[%s]" % content.rstrip().replace(b"\n", b","))  # far faster
        if len(whole) == content.count(b"\n") and _are_plain(whole):
            return whole, 0
    texts = content.splitlines()
    for line in map(json_object, texts):
        has_numbers = all(isinstance(value, int | float | None) for value in line.values())
        if has_numbers and is_finite(line.get("step")) and is_finite(line.get("time_s")):
            lines.append({key: value if is_finite(value) else None for key, value in line.items()})
    return lines, len(texts) - len(lines)


def _are_plain(lines: list[dict[str, Any]]) -> bool:
    """Return whether all lines have a step and a time, and only finite numbers."""
    values = [*chain.from_iterable(map(dict.values, lines))]
    has_steps = all("step" in line and "time_s" in line for line in lines)
    # None and text have no sum; that with a NaN is NaN, while the largest may be another number.
    return has_steps and isfinite(sum(values)) and max(map(abs, values)) <= MAX_NUMBER


def _sign_of_life(state: Standing) -> str:
    """Return the status of a run that has not ended, and the minutes since its last heartbeat."""
    minutes = int(state.seen_s or 0.0) // 60
    age = duration(60 * minutes) if minutes > 0 else "less than a minute"
    status = LOST if state.status == LOST else f"still {state.status}"
    return f"{status}; last sign of life {age} ago"


def _problem(record: Mapping[str, Any]) -> str | None:
    """Return why a run that has ended is not usable; None if it is usable."""
    status = record.get("status")
    if status in (Status.FAILED, Status.PREEMPTED):
        reason = nested(record, "error", "sentence") or f"at step {record.get('step', 0)}"
        return f"{status}: {reason}"
    if record.get("task") in WITHOUT_METRICS:
        return f"a task={record['task']} run has no metrics to compare"
    wrong = [] if status == Status.COMPLETED else ["status"]
    wrong += [name for name in REQUIRED if not _is_valid(record, name)]
    measured = record.get("collectives", [])
    if not (isinstance(measured, list) and all(map(_is_measured, measured))):
        wrong.append("collectives")
    if wrong:
        value = reprlib.repr(record.get(wrong[0]))
        return f"{RUN_RECORD} has an unknown format: {wrong[0]} is {value}"
    return None


def _is_valid(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    return isinstance(value, REQUIRED[name]) and not (isinstance(value, int) and value < 1)


def _is_measured(call: Any) -> bool:
    """Return whether an entry of a record's `collectives` has a size and a time."""
    size, time_us = nested(call, "bytes"), nested(call, "latency_us", "median")
    return is_finite(size) and is_finite(time_us) and size >= 0 and time_us > 0


def _ran_out(record: Mapping[str, Any]) -> str | None:
    """Return how a run ran out of memory or time; None if it ended in another way."""
    if record.get("task") in WITHOUT_METRICS or not all(_is_valid(record, key) for key in SIZES):
        return None
    if record.get("status") == Status.PREEMPTED:  # by a signal, as at a job's time limit
        return "preempted"
    is_failed = record.get("status") == Status.FAILED
    sentence = str(nested(record, "error", "sentence")) if is_failed else ""
    if "out-of-memory killer" in sentence:  # perhaps because of another process
        return "perhaps out of memory"
    return "out of memory" if OUT_OF_MEMORY.search(sentence) else None


def _notes(run: RecordedRun, num_damaged: int) -> Iterator[str]:
    """Yield remarks about a run that has a row."""
    version = nested(run.record, "versions", "ddp_runner")
    if version != __version__:
        yield f"written by ddp_runner {version or '(unknown)'}, this is {__version__}"
    if lost := sorted(run.record["metrics"].keys() - run.final.keys()):
        yield f"not finite at the end, so not compared: {listed(lost)}"
    if best_step(run.record):
        yield "losses and metrics are from its best step, which it exports; see checkpoint.monitor"
    if num_damaged:
        num_lines = num_damaged + len(run.lines)
        yield f"skipped {num_damaged} of {num_lines} lines of {METRICS_FILE}: damaged"
    if (count := len(run.sessions)) > 1:
        yield f"resumed: wall s is the sum of its {count} sessions, start-up s is from the first"
    if isinstance(changes := run.record.get("changes"), list) and changes:
        changed = listed([*map(str, changes)])
        yield f"its config and code are the last session's: a resume changed {changed}"
    if len(run.values("perf/samples_per_s")) == 1 and "of_run" not in run.record:
        yield (
            "no samples/s: perf/samples_per_s has only one line, the warm-up; lower "
            "train.log_every_steps"
        )
