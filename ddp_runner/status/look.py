"""One run folder at one moment: whether its run is alive, how far it is, what it waits for.

Torch-free.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.status.pace import Pace, read_pace
from ddp_runner.sweep.plan_file import PLAN
from ddp_runner.tracking.alive import DAMAGED, LOST, SILENT, Standing, standing
from ddp_runner.tracking.run_dir import RunDir

UNREADABLE = "unreadable"
STALLED_S, STALLED_STEPS = 60.0, 20.0  # a step that takes so long, and so many times the usual
WITHOUT_STEPS = ("collectives", "check", "predict", "export", "sample")  # tasks that take no steps


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
    steps_per_s: float | None = None
    left_s: float | None = None  # at this pace
    seen_s: float | None = None  # since the last sign of life
    idle_s: float | None = None  # since the last step, or whatever else rank 0 began
    hosts: tuple[str, ...] = ()  # rank 0's first
    num_ranks: int | None = None
    num_nodes: int | None = None
    restarts: int = 0
    tags: tuple[str, ...] = ()
    reason: str | None = None  # why it waits, or has ended: one line

    @property
    def is_shown(self) -> bool:
        """Whether it is listed without --all: it is alive, or should be."""
        return self.status not in (*Status, DAMAGED) or self.status == Status.RUNNING

    @property
    def is_missing(self) -> bool:
        """Whether it should be alive and gives no sign of it."""
        return self.status in (LOST, SILENT)


def look(folder: Path, *, server_time: Callable[[], float] = time.time) -> RunStatus:
    """Return the status of a run.

    Args:
        folder: of the run.
        server_time: returns the time by the clock of the folder's file system, which stamps files.
    """
    run_dir = RunDir(folder)
    found = standing(run_dir, server_time=server_time)
    if found.fault is not None:
        return RunStatus(folder, DAMAGED, reason=found.fault)
    try:
        if found.seen_s is None:
            return _of_ended(folder, found)
        return _of_alive(run_dir, found, found.seen_s, now=server_time())
    except UserError as error:
        return RunStatus(folder, DAMAGED, reason=str(error))


def _of_alive(run_dir: RunDir, found: Standing, seen_s: float, *, now: float) -> RunStatus:
    record, beat, status = found.record, found.beat, found.status
    pace = Pace()
    if record.get("task") not in WITHOUT_STEPS:
        pace = read_pace(run_dir.metrics)
    steps = [one for one in (_number(beat.get("step")), pace.step) if one is not None]
    step, total = max(steps, default=None), _number(beat.get("total_steps"))
    idle_s = beat.get("idle_s")  # at the beat
    if found.beat_at is not None and isinstance(idle_s, int | float):
        idle_s += max(0.0, now - found.beat_at)
    else:
        idle_s = None
    left_s = None
    if status == Status.RUNNING and step is not None and total and pace.steps_per_s:
        left_s = max(0, total - step) / pace.steps_per_s
    return RunStatus(
        run_dir.path,
        status,
        **_facts(record, beat.get("host") or record.get("host")),
        step=step,
        total_steps=total,
        epoch=_number(beat.get("epoch"), pace.epoch),
        total_epochs=_number(beat.get("total_epochs")),
        samples_per_s=pace.samples_per_s,
        steps_per_s=pace.steps_per_s,
        left_s=left_s,
        seen_s=seen_s,
        idle_s=idle_s,
        reason=_reason(run_dir, found, idle_s=idle_s, pace=pace),
    )


def _of_ended(folder: Path, found: Standing) -> RunStatus:
    """Return the status of a run that has ended, or that its sweep has only queued."""
    record, status = found.record, found.status
    error = record.get("error")
    sentence = error.get("sentence") if isinstance(error, dict) else record.get("stopped_early")
    if sentence is None and status == Status.PREEMPTED:
        sentence = f"stopped after a checkpoint; go on with {RunDir(folder).resume_argument}"
    step, epoch = _number(record.get("step")), _number(record.get("epoch"))
    if record.get("task") in WITHOUT_STEPS:
        step = epoch = None
    elif step is None:  # a run that failed has not written it
        pace = read_pace(RunDir(folder).metrics)
        step, epoch = pace.step, pace.epoch
    reason = None if sentence is None else str(sentence)
    facts = _facts(record, record.get("host"))
    return RunStatus(folder, status, step=step, epoch=epoch, reason=reason, **facts)


def _reason(run_dir: RunDir, found: Standing, *, idle_s: float | None, pace: Pace) -> str | None:
    status, holder = found.status, found.holder
    if status == LOST:
        who = f"process {holder[0]} on {holder[1]} is gone" if holder else "no process runs it"
        if (run_dir.path.parent / PLAN).exists():
            return f"{who}; give the sweep's command again"
        return f"{who}; go on with {run_dir.resume_argument}"
    if status == SILENT:
        who = f"process {holder[0]} on {holder[1]}" if holder else "its process"
        return f"{who} exists and rank 0 gives no sign: suspended, or its disk does not answer"
    usual_s = STALLED_STEPS / pace.steps_per_s if pace.steps_per_s else 0.0
    if status == Status.RUNNING and idle_s is not None and idle_s > max(STALLED_S, usual_s):
        return f"no step for {idle_s:.0f} s: a rank may be late or stuck; backend.timeout_s ends it"
    return None


def _facts(record: Mapping[str, Any], host: Any) -> dict[str, Any]:
    """Return where a run is, or was, and its tags; `host` is rank 0's."""
    tags, hosts = record.get("tags"), record.get("hosts", [host])
    return {
        "hosts": tuple(str(one) for one in hosts if one) if isinstance(hosts, list) else (),
        "num_ranks": _number(record.get("world_size")),
        "num_nodes": _number(record.get("num_nodes")),
        "restarts": _number(record.get("restarts")) or 0,
        "tags": tuple(map(str, tags)) if isinstance(tags, list) else (),
    }


def _number(*values: Any) -> int | None:
    """Return the first value that is a whole number: another version may have written it."""
    return next((one for one in values if type(one) is int), None)
