"""Find run folders below paths and read them: run.json, metrics.jsonl and .hydra/config.yaml.

Of a run that cannot be compared, whatever is readable is kept, beside the reason.
"""

import json
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_runner import __version__
from ddp_runner.compare.recorded_run import RecordedRun, best_step, is_finite
from ddp_runner.config.identity import leaves
from ddp_runner.config.sections import WITHOUT_METRICS
from ddp_runner.errors import UserError, duration, listed, one_line
from ddp_runner.files import is_missing, read_file, read_yaml
from ddp_runner.job import Status
from ddp_runner.tracking.alive import LOST, Standing, standing
from ddp_runner.tracking.run_dir import CONFIG_FILE, METRICS_FILE, RUN_RECORD, SUBFOLDERS, RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record

REQUIRED = {"config_hash": str, "world_size": int, "num_devices": int, "metrics": dict}
SIZES = ("world_size", "num_devices")
SHOWN = (  # by a comparison or a report
    *(RUN_RECORD, METRICS_FILE, CONFIG_FILE, ".hydra", ".hydra/overrides.yaml"),
    *("logs", "logs/failure.txt"),
)
# How torch, the kernel, Slurm and Python word it in an error.
OUT_OF_MEMORY = re.compile(r"(?i)out ?of ?memory|allocate memory|took more memory|MemoryError")


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs in and below folders, each once, even if the paths overlap.

    A copy of a run, recognised by its config hash and the time of its last start, is left out.

    Raises:
        UserError: one of the paths contains no run.
    """
    runs: dict[object, RecordedRun] = {}
    seen: set[Path] = set()
    for path in paths:
        folders = sorted(_run_folders(path))
        if not folders:
            raise UserError(
                f"{path} contains no run (a folder with a {RUN_RECORD}); give the folder of a run, "
                "of a sweep, or outputs"
            )
        for folder in folders:
            resolved = folder.resolve()
            if resolved not in seen:
                seen.add(resolved)
                run = read_run(folder)
                identity = str(run.record.get("config_hash")), last_session_start(run.record)
                runs.setdefault(identity if is_finite(identity[1]) else resolved, run)
    return list(runs.values())


def tagged(runs: Sequence[RecordedRun], tags: Sequence[str]) -> list[RecordedRun]:
    """Return the runs that have all of these tags; all runs for no tags.

    Raises:
        UserError: no run has them.
    """
    chosen = [run for run in runs if set(tags) <= set(run.tags)]
    if tags and not chosen:
        known = sorted({tag for run in runs for tag in run.tags})
        hint = f"the runs have {listed(known)}" if known else "the runs have no tags"
        raise UserError(f"--tag ({', '.join(tags)}): no run has all of these tags; {hint}")
    return chosen


def read_run(folder: Path) -> RecordedRun:
    """Return one run; one that is damaged, not completed or of another format has a reason."""
    reasons: list[str] = []

    def read(name: str, reader: Callable[[Path], Any], nothing: Any) -> Any:
        try:
            return reader(folder / name)
        except UserError as error:
            reasons.append(str(error).replace(f"{folder}{os.sep}", ""))  # equal for all runs
        except Exception as error:  # PyYAML raises errors of any type for odd tags
            why = isinstance(error, OSError) and error.strerror
            reasons.append(f"{name} cannot be read ({why or one_line(error)})")
        return nothing

    if link := read(RUN_RECORD, _link_beside, None):
        reason = f"{link} is a link, which may lead to any file; put the file itself there"
        return RecordedRun(folder, reason=reason)
    record = read(RUN_RECORD, _read_record, {})
    if record.get("status") == Status.RUNNING:
        found = standing(RunDir(folder))
        record = {**(found.record or record), "status": found.status}
        if found.seen_s is not None or found.fault:  # else it has ended meanwhile
            reasons.append(found.fault or _sign_of_life(found))
    if not reasons and (problem := _problem(record)):
        reasons.append(problem)
    config = read(CONFIG_FILE, _read_config, {})
    lines, num_damaged = read(METRICS_FILE, read_lines, ([], 0))
    run = RecordedRun(folder, record, config, tuple(lines))
    if reasons:
        return replace(run, reason=reasons[0], ran_out=_ran_out(record) if config else None)
    return replace(run, notes=tuple(_notes(run, num_damaged)))


def _run_folders(path: Path) -> Iterator[Path]:
    """Yield the folders that hold at least a part of a run, and those that cannot be read."""
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
    """Return which of the files that a report shows is a link; None if none is.

    A folder may come from somebody else, and a report is passed on: a link could lead anywhere.
    """
    return next((name for name in SHOWN if (record.parent / name).is_symlink()), None)


def _read_record(path: Path) -> dict[str, Any]:
    if is_missing(path) and path.parent.is_dir():
        raise UserError(f"no {RUN_RECORD}: the run never started, or the copy is incomplete")
    return read_run_record(path.parent)


def _read_config(path: Path) -> dict[str, Any]:
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping")
    # Lists in one piece: two runs may differ in how many items a list has.
    return dict(leaves(config, whole_lists=True))


def read_lines(path: Path) -> tuple[list[dict[str, float | None]], int]:
    """Return the valid lines of a metrics file, and the number of damaged lines."""
    lines: list[dict[str, float | None]] = []
    num_damaged = 0
    for text in read_file(path).splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            has_numbers = all(isinstance(value, int | float | None) for value in line.values())
            if not (has_numbers and is_finite(line["step"]) and is_finite(line["time_s"])):
                raise ValueError
            # json makes new strings for the keys of each line; 10,000 runs have millions of lines.
            lines.append(
                {sys.intern(key): one if is_finite(one) else None for key, one in line.items()}
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            num_damaged += 1
    return lines, num_damaged


def _sign_of_life(found: Standing) -> str:
    """Return how a run stands that has not ended, and when it was last seen, to the minute."""
    minutes = int(found.seen_s or 0.0) // 60
    age = duration(60 * minutes) if minutes > 0 else "less than a minute"
    words = LOST if found.status == LOST else f"still {found.status}"
    return f"{words}; last sign of life {age} ago"


def _problem(record: Mapping[str, Any]) -> str | None:
    """Return why a run that has ended is not usable; None if it is."""
    status = record.get("status")
    if status in (Status.FAILED, Status.PREEMPTED):
        return f"{status}: {_sentence(record) or 'at step ' + str(record.get('step', 0))}"
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


def _sentence(record: Mapping[str, Any]) -> str | None:
    """Return why a run failed; None if its record does not say so."""
    error = record.get("error")
    return error.get("sentence") if isinstance(error, dict) else None


def _is_valid(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    return isinstance(value, REQUIRED[name]) and not (isinstance(value, int) and value < 1)


def _is_measured(call: Any) -> bool:
    """Return whether an entry of a record's `collectives` has a size and a time."""
    try:
        size, time_us = call["bytes"], call["latency_us"]["median"]
    except (LookupError, TypeError):
        return False
    return is_finite(size) and is_finite(time_us) and size >= 0 and time_us > 0


def _ran_out(record: Mapping[str, Any]) -> str | None:
    """Return how a run ran out of memory or of time; None if it ended in another way.

    A preempted run was stopped by a signal, as at the time limit of its job.
    """
    if record.get("task") in WITHOUT_METRICS or not all(_is_valid(record, one) for one in SIZES):
        return None
    if record.get("status") == Status.PREEMPTED:
        return "preempted"
    sentence = str(_sentence(record)) if record.get("status") == Status.FAILED else ""
    if "out-of-memory killer" in sentence:  # or another process
        return "perhaps out of memory"
    return "out of memory" if OUT_OF_MEMORY.search(sentence) else None


def _notes(run: RecordedRun, num_damaged: int) -> Iterator[str]:
    """Yield what a reader must know about a run that is in a row."""
    theirs = run.field("versions", "ddp_runner")
    if theirs != __version__:
        yield f"written by ddp_runner {theirs or '(unknown)'}, this is {__version__}"
    if lost := sorted(run.record["metrics"].keys() - run.final.keys()):
        yield f"not finite at the end, so not compared: {listed(lost)}"
    if best_step(run.record):
        yield "losses and metrics of its best step, whose model it exports; see checkpoint.monitor"
    if num_damaged:
        num_lines = num_damaged + len(run.lines)
        yield f"skipped {num_damaged} of {num_lines} lines of {METRICS_FILE}: damaged"
    if len(run.sessions) > 1:
        yield (
            f"resumed: wall s is the sum of its {len(run.sessions)} sessions, start-up s is from "
            "the first"
        )
    if len(run.values("perf/samples_per_s")) == 1 and "of_run" not in run.record:
        yield (
            "no samples/s: perf/samples_per_s has only one line, the warm-up; lower "
            "train.log_every_steps"
        )
