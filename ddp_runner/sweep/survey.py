"""The runs and sweeps below paths at one moment: alive or not, how far, what for. Torch-free."""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ddp_runner.config.sections import WITHOUT_STEPS
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import open_file
from ddp_runner.job import Status
from ddp_runner.sweep.plan_file import PLAN, read_plan
from ddp_runner.tracking.alive import DAMAGED, LOST, SILENT, Standing, standing
from ddp_runner.tracking.run_dir import RUN_RECORD, SUBFOLDERS, RunDir

UNREADABLE = "unreadable"
STALLED_S, STALLED_STEPS = 60.0, 20.0  # a step that takes so long, and so many times the usual
TAIL_BYTES, MOST_LINES = 2**14, 20  # of metrics.jsonl, at its end


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment; a number is None where it is not known."""

    folder: Path
    status: str  # as of a ``Standing``; unreadable: nobody can tell whether a run is here
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None  # counts from 1
    total_epochs: int | None = None
    samples_per_s: float | None = None
    steps_per_s: float | None = None  # over the last lines, with evaluations and checkpoints
    left_s: float | None = None  # at this pace
    seen_s: float | None = None  # since the last sign of life
    idle_s: float | None = None  # since the last step, or whatever else rank 0 began
    hosts: tuple[str, ...] = ()  # rank 0's first
    num_ranks: int | None = None
    num_nodes: int | None = None
    restarts: int = 0
    tags: tuple[str, ...] = ()
    reason: str | None = None  # why it waits, or has ended: one line
    is_left_out: bool = False  # it is no job of its sweep any more: a YAML was edited

    @property
    def is_shown(self) -> bool:
        """Whether it is listed without --all: it is alive, or should be."""
        has_ended = self.status in (*Status, DAMAGED) and self.status != Status.RUNNING
        return not (has_ended or self.is_left_out)

    @property
    def is_missing(self) -> bool:
        """Whether it should be alive and gives no sign of it."""
        return self.status in (LOST, SILENT) and not self.is_left_out


@dataclass(frozen=True)
class SweepStatus:
    """A sweep at one moment."""

    folder: Path
    counts: Mapping[str, int]  # how many jobs have each status; an abandoned one is lost
    reason: str | None = None  # why its plan cannot be read

    @property
    def is_shown(self) -> bool:
        """Whether it is listed without --all: a job of it runs, or should."""
        return self.reason is not None or bool({Status.RUNNING, LOST} & self.counts.keys())


def survey(paths: Sequence[Path]) -> tuple[list[RunStatus], list[SweepStatus]]:
    """Return the status of every run and sweep below the paths, each once, by folder.

    Raises:
        UserError: a path does not exist.
    """
    runs: dict[Path, RunStatus] = {}
    sweeps: dict[Path, SweepStatus] = {}

    def note(error: OSError) -> None:
        folder = Path(error.filename)
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            reason = f"the folder cannot be read ({error.strerror})"
            runs.setdefault(folder.resolve(), RunStatus(folder, UNREADABLE, reason=reason))
        elif folder == path:
            raise UserError(
                f"{path} is not a folder; give that of a run, of a sweep, or of all outputs"
            ) from error

    for path in paths:
        server_time = cache(partial(folder_time, path))
        for name, subfolders, files in os.walk(path, onerror=note):
            folder = Path(name)
            inside = SUBFOLDERS if RUN_RECORD in files else ()
            kept = (one for one in subfolders if not one.startswith(".") and one not in inside)
            subfolders[:] = sorted(kept)
            if RUN_RECORD in files:
                runs.setdefault(folder.resolve(), look(folder, server_time=server_time))
            if PLAN in files:
                sweeps.setdefault(folder.resolve(), _sweep(folder, server_time))
    return [*runs.values()], [*sweeps.values()]


def folder_time(folder: Path) -> float:
    """Return the time by the clock that stamps the files of a folder.

    On a shared disk that is the file server's clock. Where nothing can be written, return the time
    of this machine.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # on most disks it never has a name
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())  # NFS asks the server only now
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def look(folder: Path, *, server_time: Callable[[], float] = time.time) -> RunStatus:
    """Return the status of a run.

    Args:
        folder: of the run.
        server_time: returns the time by the clock of the folder's file system, which stamps files.
    """
    run_dir = RunDir(folder)
    found = standing(run_dir, server_time=server_time)
    try:
        numbers = {} if found.fault else _numbers(run_dir, found, server_time())
    except UserError as error:
        return RunStatus(folder, DAMAGED, reason=str(error))
    record = found.record
    is_left_out = found.status == LOST and _is_left_out(folder)
    tags, host = record.get("tags"), found.beat.get("host") or record.get("host")
    hosts = record.get("hosts", [host])
    return RunStatus(
        folder,
        found.status,
        hosts=tuple(str(one) for one in hosts if one) if isinstance(hosts, list) else (),
        num_ranks=_whole(record.get("world_size")),
        num_nodes=_whole(record.get("num_nodes")),
        restarts=_whole(record.get("restarts")) or 0,
        tags=tuple(map(str, tags)) if isinstance(tags, list) else (),
        seen_s=found.seen_s,
        reason=_reason(run_dir, found, numbers, is_left_out=is_left_out),
        is_left_out=is_left_out,
        **numbers,
    )


def _numbers(run_dir: RunDir, found: Standing, now: float) -> dict[str, Any]:
    """Return how far a run is and how fast, by its heartbeat, its record and its last metrics.

    Raises:
        UserError: its metrics cannot be read.
    """
    is_alive, idle_s = found.seen_s is not None, found.beat.get("idle_s")
    own = found.beat if is_alive else found.record
    names = ("step", "total_steps", "epoch", "total_epochs")
    numbers: dict[str, Any] = {name: _whole(own.get(name)) for name in names}
    if found.beat_at is not None and isinstance(idle_s, int | float):
        numbers["idle_s"] = idle_s + max(0.0, now - found.beat_at)
    if found.record.get("task") in WITHOUT_STEPS:
        return numbers if is_alive else {}
    has_ended_well = not is_alive and numbers["step"] is not None
    lines = [] if has_ended_well else [*_last_lines(run_dir.metrics)][-MOST_LINES:]
    if not lines:
        return numbers
    first, last = lines[0], lines[-1]
    elapsed_s, num_steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
    if last["step"] > (numbers["step"] or 0):  # the last heartbeat is older
        numbers |= {"step": last["step"], "epoch": _whole(last.get("epoch")) or numbers["epoch"]}
    speeds = [line["perf/samples_per_s"] for line in lines if line.get("perf/samples_per_s")]
    numbers["samples_per_s"] = speeds[-1] if speeds else None
    if elapsed_s > 0 and num_steps > 0:
        numbers["steps_per_s"] = num_steps / elapsed_s
        if found.status == Status.RUNNING and (total := numbers["total_steps"]):
            numbers["left_s"] = max(0, total - numbers["step"]) / numbers["steps_per_s"]
    return numbers


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last whole, undamaged lines of a file of metrics."""
    with os_errors(f"{path} cannot be read", fix="make it readable"):
        try:
            with open_file(path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read()
        except FileNotFoundError:
            return
    for part in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # cut off, or damaged
            line = json.loads(part)
            if type(line["step"]) is int and isinstance(line["time_s"], int | float):
                yield line


def _is_left_out(run: Path) -> bool:
    """Return whether a run is in a sweep's folder and is no job of the sweep any more."""
    try:
        jobs = read_plan(run.parent).jobs.values()
    except UserError:  # nobody can tell; the sweep's own line says why
        return False
    return bool(jobs) and run.name not in {one.folder for one in jobs}


def _reason(
    run_dir: RunDir, found: Standing, numbers: Mapping[str, Any], *, is_left_out: bool
) -> str | None:
    """Return what a run waits for, or why it has ended; None if there is nothing to say."""
    status, holder = found.status, found.holder
    if status == LOST:
        who = f"process {holder[0]} on {holder[1]} is gone" if holder else "no process runs it"
        if is_left_out:
            who += ", and the run is no job of its sweep any more"
        elif (run_dir.path.parent / PLAN).exists():
            return f"{who}; give the sweep's command again"
        return f"{who}; go on with {run_dir.resume_argument}"
    if status == SILENT:
        who = f"process {holder[0]} on {holder[1]}" if holder else "its process"
        return f"{who} exists and rank 0 gives no sign: suspended, or its disk does not answer"
    if status == Status.RUNNING:
        idle_s, steps_per_s = numbers.get("idle_s"), numbers.get("steps_per_s")
        usual_s = STALLED_STEPS / steps_per_s if steps_per_s else 0.0
        if idle_s is not None and idle_s > max(STALLED_S, usual_s):
            return (
                f"no step for {idle_s:.0f} s: a rank may be late or stuck; backend.timeout_s "
                "ends it"
            )
    if found.seen_s is not None:
        return None
    if status == Status.PREEMPTED and found.sentence is None:
        return f"stopped after a checkpoint; go on with {run_dir.resume_argument}"
    stopped = found.record.get("stopped_early")
    return found.sentence or (None if stopped is None else str(stopped))


def _whole(value: Any) -> int | None:
    """Return a value that is a whole number: another version may have written it."""
    return value if type(value) is int else None


def _sweep(folder: Path, server_time: Callable[[], float]) -> SweepStatus:
    try:
        jobs = read_plan(folder).jobs.values()
    except UserError as error:
        return SweepStatus(folder, {}, str(error))
    found = (one.standing(folder, server_time=server_time) for one in jobs)
    counts = Counter(str(Status.RUNNING if one.is_alive else one.status) for one in found)
    return SweepStatus(folder, dict(counts))
