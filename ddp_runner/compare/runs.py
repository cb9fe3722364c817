"""Find run folders below paths and read them: run.json, metrics.jsonl and .hydra/config.yaml.

A run that cannot be used has a reason instead of data.
"""

import json
import os
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from ddp_runner import __version__
from ddp_runner.compare.run import Run, best_step, is_finite
from ddp_runner.config.identity import leaves
from ddp_runner.errors import UserError, listed, one_line
from ddp_runner.files import is_missing, read_file, read_yaml
from ddp_runner.job import Status
from ddp_runner.tracking.alive import LOST, standing
from ddp_runner.tracking.run_dir import CONFIG_FILE, METRICS_FILE, RUN_RECORD, SUBFOLDERS, RunDir
from ddp_runner.tracking.run_record import RunRecord, read_run_record

REQUIRED = {"config_hash": str, "world_size": int, "num_devices": int, "metrics": dict}
WITHOUT_METRICS = ("check", "predict", "export", "sample")  # tasks
# How torch, the kernel, Slurm and Python word it in an error.
OUT_OF_MEMORY = re.compile(r"(?i)out ?of ?memory|allocate memory|took more memory|MemoryError")
KNOWN_FIELDS = get_type_hints(RunRecord).keys()


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in and below folders, each once, even if the paths overlap.

    A copy of a run, recognised by its config hash and the time of its last start, is left out.

    Raises:
        UserError: one of the paths contains no run.
    """
    runs: dict[object, Run] = {}
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
            if resolved in seen:
                continue
            seen.add(resolved)
            run = read_run(folder)
            started_at = [run.record, *run.sessions][-1].get("started_at")
            has_identity = is_finite(started_at) and "config_hash" in run.record
            identity = (str(run.record["config_hash"]), started_at) if has_identity else resolved
            runs.setdefault(identity, run)
    return list(runs.values())


def tagged(runs: Sequence[Run], tags: Sequence[str]) -> list[Run]:
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


def read_run(folder: Path) -> Run:
    """Return one run; a run that is damaged, not completed or of another format has a reason."""
    record: Mapping[str, Any] = {}
    try:
        if folder.is_dir() and not (folder / RUN_RECORD).exists():
            reason = f"no {RUN_RECORD}: the run never started, or the copy is incomplete"
            return Run(folder, reason=reason)
        if (link := _link_in(folder)) is not None:
            reason = f"{link} is a link, which may lead to any file; put the file itself there"
            return Run(folder, reason=reason)
        record = read_run_record(folder)
        if (problem := _problem(folder, record)) is not None:
            run, ran_out = Run(folder, reason=problem, record=record), _ran_out(record)
            if ran_out and (whole := with_what_is_there(run)).config:
                return replace(whole, ran_out=ran_out)
            return run
        keys = _read_config(folder / CONFIG_FILE)
        lines, num_damaged = _read_lines(folder / METRICS_FILE)
    except UserError as error:
        reason = str(error).replace(f"{folder}{os.sep}", "")  # equal for all runs with this fault
    except OSError as error:
        reason = f"{Path(error.filename or folder).name} cannot be read ({error.strerror or error})"
    except Exception as error:  # PyYAML raises errors of any type for odd tags
        name = CONFIG_FILE if record else RUN_RECORD
        reason = f"{name} cannot be read ({one_line(error)})"
    else:
        run = Run(folder, record=record, config=keys, lines=tuple(lines))
        return replace(run, notes=tuple(_notes(run, num_damaged)))
    return Run(folder, reason=reason, record=record)


def with_what_is_there(run: Run) -> Run:
    """Return a run that cannot be compared with its config and its lines, where they are readable.

    A reader of its page wants to know how far it came; a comparison does not wait for that.
    """
    with suppress(OSError):
        if _link_in(run.folder) is not None:
            return run
    with suppress(Exception):  # its reason says what is wrong; PyYAML raises errors of any type
        run = replace(run, config=_read_config(run.folder / CONFIG_FILE))
    with suppress(OSError):
        run = replace(run, lines=tuple(_read_lines(run.folder / METRICS_FILE)[0]))
    return run


def _run_folders(path: Path) -> Iterator[Path]:
    """Yield the folders that hold at least a part of a run, and those that cannot be read."""
    unreadable: list[Path] = []

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            unreadable.append(Path(error.filename))

    walk = os.walk(path, onerror=note)
    for name, subfolders, files in walk:
        folder = Path(name)
        if RUN_RECORD in files or METRICS_FILE in files or not is_missing(folder / CONFIG_FILE):
            subfolders[:] = set(subfolders) - set(SUBFOLDERS)
            yield folder
    yield from unreadable


def _link_in(folder: Path) -> str | None:
    """Return what is a link among that which a comparison reads; None if nothing is.

    A folder may come from somebody else, and a report, which is passed on, shows what is read.
    """
    names = (RUN_RECORD, METRICS_FILE, CONFIG_FILE, Path(CONFIG_FILE).parent.name)
    return next((name for name in names if (folder / name).is_symlink()), None)


def _problem(folder: Path, record: Mapping[str, Any]) -> str | None:
    """Return why a run is not completed or not usable; None if it is."""
    status, error = record.get("status"), record.get("error")
    if status == Status.RUNNING:
        found = standing(RunDir(folder))
        minutes = int(found.seen_s or 0.0) // 60
        age = f"{minutes} min ago" if minutes > 0 else "less than a minute ago"
        is_lost = found.status == LOST
        return f"{'killed' if is_lost else f'still {found.status}'}; last sign of life {age}"
    if status in (Status.FAILED, Status.PREEMPTED):
        sentence = error.get("sentence") if isinstance(error, dict) else None
        return f"{status}: {sentence or 'at step ' + str(record.get('step', 0))}"
    if status != Status.COMPLETED:
        return f"{RUN_RECORD} has an unknown format: status is {reprlib.repr(status)}"
    if "checks" in record or record.get("task") in WITHOUT_METRICS:
        task = "check" if "checks" in record else record["task"]
        return f"a task={task} run has no metrics to compare"
    for name, kind in REQUIRED.items():
        if not _is_valid(record, name):
            wrong = f"{name} is {reprlib.repr(record.get(name))}, expected {kind.__name__}"
            return f"{RUN_RECORD} has an unknown format: {wrong}"
    measured = record.get("collectives", [])
    if not (isinstance(measured, list) and all(map(_is_measured, measured))):
        return f"{RUN_RECORD} has an unknown format: collectives is {reprlib.repr(measured)}"
    return None


def _is_valid(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    return isinstance(value, REQUIRED[name]) and not (isinstance(value, int) and value < 1)


def _ran_out(record: Mapping[str, Any]) -> str | None:
    """Return how a run ran out of memory or of time; None if it ended in another way.

    A preempted run was stopped by a signal, as at the time limit of its job.
    """
    has_sizes = _is_valid(record, "world_size") and _is_valid(record, "num_devices")
    if record.get("task") in WITHOUT_METRICS or not has_sizes:
        return None
    if record.get("status") == Status.PREEMPTED:
        return "preempted"
    error = record.get("error") if record.get("status") == Status.FAILED else None
    sentence = str(error.get("sentence")) if isinstance(error, dict) else ""
    if "out-of-memory killer" in sentence:  # or another process
        return "perhaps out of memory"
    return "out of memory" if OUT_OF_MEMORY.search(sentence) else None


def _is_measured(call: Any) -> bool:
    """Return whether an entry of a record's `collectives` has a size and a time."""
    try:
        size, time_us = call["bytes"], call["latency_us"]["median"]
    except (LookupError, TypeError):
        return False
    return is_finite(size) and is_finite(time_us) and size >= 0 and time_us > 0


def _read_config(path: Path) -> dict[str, Any]:
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise ValueError("it is not a mapping")
    # Lists in one piece: two runs may differ in how many items a list has.
    return dict(leaves(config, whole_lists=True))


def _read_lines(path: Path) -> tuple[list[dict[str, float | None]], int]:
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


def _notes(run: Run, num_damaged: int) -> Iterator[str]:
    """Yield what a reader must know about a run that is in a row."""
    theirs = run.field("versions", "ddp_runner")
    if theirs != __version__:
        unknown = ", ".join(sorted(set(run.record) - KNOWN_FIELDS))
        yield (
            f"written by ddp_runner {theirs or '(unknown)'}, this is {__version__}"
            + (f"; unknown fields: {unknown}" if unknown else "")
        )
    if lost := [name for name, value in run.record["metrics"].items() if not is_finite(value)]:
        yield f"not finite at the end, so not compared: {listed(sorted(lost))}"
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
