"""Marks of a launch, by which a restarted worker group finds its own run folder and no other.

Marks outlive a restart: the agents that watch the ranks (torchrun's, or our own launcher), and the
scheduler's name for the job. run.json keeps both. Two equal commands never share an agent, and an
elastic worker group always keeps one of its agents. Torch-free.
"""

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_marks(env: DistEnv, *, has_agent: bool) -> list[str]:
    """Return this rank's marks; none if nothing would restart it.

    Args:
        env: this rank's place.
        has_agent: whether our own launcher watches this rank.
    """
    marks = [_agent()] if has_agent or env.launcher == "torchrun" else []
    return marks + ([env.launch_id] if env.launch_id else [])


def find_own_run(runs: Iterable[RunDir], *, marks: Collection[str], work: str) -> RunDir | None:
    """Return the first run folder that an earlier attempt of this launch left.

    Args:
        runs: run folders, newest first.
        marks: of all ranks, from `own_marks`.
        work: the config's ``work_hash``.
    """
    for run_dir in runs:
        record = _record(run_dir)
        if record.get("work_hash") == work and not set(marks).isdisjoint(marks_in(record)):
            return run_dir
    return None


def find_unfinished_run(runs: Iterable[RunDir], *, work: str) -> RunDir | None:
    """Return the first unfinished run of this work that no process holds.

    Args:
        runs: run folders, newest first.
        work: the config's ``work_hash``.
    """
    for run_dir in runs:
        record = _record(run_dir)
        is_unfinished = record.get("status") in (Status.RUNNING, Status.PREEMPTED, Status.FAILED)
        if record.get("work_hash") == work and is_unfinished and not run_dir.is_locked:
            return run_dir
    return None


def is_same_work(run_dir: os.PathLike[str], *, work: str) -> bool:
    """Return whether the folder holds a run of this work, finished or not."""
    return bool(_record(run_dir).get("work_hash") == work)


def marks_in(record: Mapping[str, Any]) -> list[str]:
    """Return the marks of all launches of a run, from its run.json."""
    marks = record.get("launches")
    return [str(one) for one in marks] if isinstance(marks, list) else []


def _record(run_dir: os.PathLike[str]) -> dict[str, Any]:
    """Return a folder's run.json; no fields if there is none, or if it is damaged."""
    try:
        return read_run_record(run_dir, missing_ok=True)
    except UserError:
        return {}  # nobody can resume such a run


def _agent() -> str:
    """Return the process that started this rank: host, boot, process id and start time."""
    pid = os.getppid()
    boot = BOOT_ID.read_text().strip()[:8] if BOOT_ID.exists() else "-"
    return f"agent {socket.gethostname()} {boot} {pid} {_started(pid)}"


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the boot: process ids are reused."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "-"  # no /proc, as on macOS
    return text.rpartition(")")[2].split()[19]
