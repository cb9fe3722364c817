"""The status of all runs and sweeps below some folders, for ddp_runner.status. Torch-free."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from ddp_runner.config.sections import WITHOUT_STEPS
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import json_object, open_file
from ddp_runner.job import Status
from ddp_runner.sweep.sweep_dir import PLAN, plan_or_fault
from ddp_runner.tracking.alive import DAMAGED, LOST, SILENT, Standing, standing
from ddp_runner.tracking.run_dir import RUN_RECORD, SUBFOLDERS, RunDir

UNREADABLE = "unreadable"
# A step is late after this time, and after this number of usual step times.
STALLED_S, STALLED_STEPS = 60.0, 20.0
TAIL_BYTES, MAX_LINES = 2**14, 20  # read at the end of metrics.jsonl


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment; None stands for an unknown number."""

    folder: Path
    status: str  # as in ``Standing``, or unreadable
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None  # from 1
    total_epochs: int | None = None
    samples_per_s: float | None = None
    steps_per_s: float | None = None  # over the last lines, with evaluations and checkpoints
    left_s: float | None = None  # time to the end, at this speed
    seen_s: float | None = None  # time since the last sign of life
    idle_s: float | None = None  # time since rank 0 began a step, an evaluation, …
    hosts: tuple[str, ...] = ()  # rank 0's first
    num_ranks: int | None = None
    num_nodes: int | None = None
    restarts: int = 0
    tags: tuple[str, ...] = ()
    reason: str | None = None  # why it waits or has ended, in one line
    is_left_out: bool = False  # its sweep dropped it, after the edit of a YAML

    @property
    def is_shown(self) -> bool:
        """Whether it is listed without --all: it is alive, or should be."""
        has_ended = self.status in (*Status, DAMAGED) and self.status != Status.RUNNING
        return not (has_ended or self.is_left_out)

    @property
    def is_missing(self) -> bool:
        """Whether it should be alive and gives no sign of life."""
        return self.status in (LOST, SILENT) and not self.is_left_out


@dataclass(frozen=True)
class SweepStatus:
    """A sweep at one moment."""

    folder: Path
    counts: Mapping[str, int]  # number of jobs with each status
    reason: str | None = None  # why its plan cannot be read

    @property
    def is_shown(self) -> bool:
        """Whether it is listed without --all: a job runs, or should."""
        return self.reason is not None or bool({Status.RUNNING, LOST} & self.counts.keys())


def survey(paths: Sequence[Path]) -> tuple[list[RunStatus], list[SweepStatus]]:
    """Return the status of every run and sweep below the paths, each once, by folder.

    Raises:
        UserError: a path does not exist.
    """
    runs: dict[Path, RunStatus] = {}
    sweeps: dict[Path, SweepStatus] = {}

    def note_error(error: OSError) -> None:
        folder = Path(error.filename)
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            reason = f"the folder cannot be read ({error.strerror})"
            runs.setdefault(folder.resolve(), RunStatus(folder, UNREADABLE, reason=reason))
        elif folder == path:
            raise UserError(
                f"{path} is not a folder", "give the folder of a run, of a sweep, or of all outputs"
            ) from error

    for path in paths:
        server_time = cache(partial(folder_time, path))
        for name, subfolders, files in os.walk(path, onerror=note_error):
            folder, is_run = Path(name), RUN_RECORD in files
            skipped = SUBFOLDERS if is_run else ()
            visited = (sub for sub in subfolders if not sub.startswith(".") and sub not in skipped)
            subfolders[:] = sorted(visited)
            if is_run:
                runs.setdefault(folder.resolve(), run_status(folder, server_time=server_time))
            if PLAN in files:
                sweeps.setdefault(folder.resolve(), _sweep_status(folder, server_time))
    return [*runs.values()], [*sweeps.values()]


def folder_time(folder: Path) -> float:
    """Return the time of the file server's clock, which stamps files, or of ours if read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())  # only then does NFS ask the server
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def run_status(folder: Path, *, server_time: Callable[[], float] = time.time) -> RunStatus:
    """Return the status of a run; `server_time` is the clock that stamps the folder's files."""
    run_dir = RunDir(folder)
    current = standing(run_dir, server_time=server_time)
    record = current.record
    tags, host = record.get("tags"), current.beat.get("host") or record.get("host")
    hosts = record.get("hosts", [host])
    run = RunStatus(
        folder,
        current.status,
        hosts=tuple(str(name) for name in hosts if name) if isinstance(hosts, list) else (),
        num_ranks=_integer(record.get("world_size")),
        num_nodes=_integer(record.get("num_nodes")),
        restarts=_integer(record.get("restarts")) or 0,
        tags=tuple(map(str, tags)) if isinstance(tags, list) else (),
        seen_s=current.seen_s,
        is_left_out=current.status == LOST and _is_left_out(folder),
    )
    try:
        run = run if current.fault else _with_progress(run, current, server_time())
    except UserError as error:  # metrics.jsonl cannot be read
        return RunStatus(folder, DAMAGED, reason=str(error))
    return replace(run, reason=_reason(run, current))


def _with_progress(run: RunStatus, current: Standing, now: float) -> RunStatus:
    """Return the run with its step and speed, by its heartbeat, its record and its last metrics."""
    is_alive, idle_s = current.seen_s is not None, current.beat.get("idle_s")
    has_steps = current.record.get("task") not in WITHOUT_STEPS
    if not (is_alive or has_steps):
        return run
    source = current.beat if is_alive else current.record
    names = ("step", "total_steps", "epoch", "total_epochs")
    numbers: dict[str, Any] = {name: _integer(source.get(name)) for name in names}
    run = replace(run, **numbers)
    if current.beat_at is not None and isinstance(idle_s, int | float):
        run = replace(run, idle_s=idle_s + max(0.0, now - current.beat_at))
    has_final_step = not is_alive and run.step is not None
    if has_final_step or not has_steps:
        return run
    lines = [*_last_lines(RunDir(run.folder).metrics)][-MAX_LINES:]
    if not lines:
        return run
    first, last = lines[0], lines[-1]
    if last["step"] > (run.step or 0):  # the heartbeat is older
        run = replace(run, step=last["step"], epoch=_integer(last.get("epoch")) or run.epoch)
    elapsed_s, num_steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
    steps_per_s = num_steps / elapsed_s if elapsed_s > 0 and num_steps > 0 else None
    left_s = None
    if steps_per_s and run.total_steps and current.status == Status.RUNNING:
        left_s = max(0, run.total_steps - (run.step or 0)) / steps_per_s
    speeds = [line["perf/samples_per_s"] for line in lines if line.get("perf/samples_per_s")]
    samples_per_s = speeds[-1] if speeds else None
    return replace(run, samples_per_s=samples_per_s, steps_per_s=steps_per_s, left_s=left_s)


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last lines of a metrics file, without those that are cut off or damaged."""
    if not path.exists():
        return
    with os_errors(f"{path} cannot be read", fix="make it readable"), open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        text = file.read()
    for line in map(json_object, text.splitlines()):  # the seek cuts the first
        if type(line.get("step")) is int and isinstance(line.get("time_s"), int | float):
            yield line


def _is_left_out(run: Path) -> bool:
    """Return whether a run is in a sweep's folder without being one of its jobs."""
    plan, _ = plan_or_fault(run.parent)
    return bool(plan.jobs) and run.name not in {job.folder for job in plan.jobs.values()}


def _reason(run: RunStatus, current: Standing) -> str | None:
    """Return why a run waits or has ended; None if there is nothing to say."""
    run_dir, status, holder = RunDir(run.folder), current.status, current.holder
    if status == LOST:
        loss = f"process {holder[0]} on {holder[1]} is gone" if holder else "no process runs it"
        if run.is_left_out:
            loss += ", and the run is no longer a job of its sweep"
        elif (run.folder.parent / PLAN).exists():
            return f"{loss}; give the sweep's command again"
        return f"{loss}; continue with {run_dir.resume_argument}"
    if status == SILENT:
        process = f"process {holder[0]} on {holder[1]}" if holder else "its process"
        return f"{process} exists without a sign of life: it is suspended, or its disk hangs"
    if status == Status.RUNNING and run.idle_s is not None:
        usual_s = STALLED_STEPS / run.steps_per_s if run.steps_per_s else 0.0
        if run.idle_s > max(STALLED_S, usual_s):
            idle = f"no step for {run.idle_s:.0f} s"
            return f"{idle}: a rank is late or stuck; backend.timeout_s ends it"
    if current.seen_s is not None:
        return None
    if status == Status.PREEMPTED and current.sentence is None:
        return f"stopped after a checkpoint; continue with {run_dir.resume_argument}"
    stopped = current.record.get("stopped_early")
    return current.sentence or (None if stopped is None else str(stopped))


def _integer(value: Any) -> int | None:
    """Return an integer as it is, and None for other values: another version may write them."""
    return value if type(value) is int else None


def _sweep_status(folder: Path, server_time: Callable[[], float]) -> SweepStatus:
    plan, fault = plan_or_fault(folder)
    standings = (job.standing(folder, server_time=server_time) for job in plan.jobs.values())
    counts = Counter(str(Status.RUNNING if job.is_alive else job.status) for job in standings)
    return SweepStatus(folder, dict(counts), fault)
