"""Which launch a run folder belongs to: a restarted worker group finds its own, and no other's.

A launch is known by what outlives a restart: the agents that watch its ranks (torchrun's, or our
own launcher's), and the scheduler's name for it. run.json keeps both. Two equal commands never
share an agent, and an elastic worker group always keeps one. Torch-free.
"""

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import is_locked
from ddp_runner.tracking.run_record import RUN_RECORD, read_run_record

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_marks(env: DistEnv, *, has_agent: bool) -> list[str]:
    """Return what this rank knows of its launch, none where nothing would start it again.

    Args:
        env: of this rank.
        has_agent: whether our own launcher watches this rank.
    """
    marks = [_agent()] if has_agent or env.launcher == "torchrun" else []
    return marks + ([env.launch_id] if env.launch_id else [])


def find_own_run(runs: Iterable[Path], *, marks: Collection[str], work: str) -> Path | None:
    """Return the first run folder that an earlier attempt of this launch has left.

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


def find_unfinished_run(runs: Iterable[Path], *, work: str) -> Path | None:
    """Return the first run folder with this work left to do that no process holds.

    Args:
        runs: run folders, newest first.
        work: the config's ``work_hash``.
    """
    for run_dir in runs:
        record = _record(run_dir)
        is_unfinished = record.get("status") in (Status.RUNNING, Status.PREEMPTED, Status.FAILED)
        if record.get("work_hash") == work and is_unfinished and not is_locked(run_dir):
            return run_dir
    return None


def is_own_run(run_dir: Path, *, marks: Collection[str], work: str) -> bool:
    """Return whether an earlier attempt of this launch left this folder."""
    return find_own_run([run_dir], marks=marks, work=work) is not None


def is_same_work(run_dir: Path, *, work: str) -> bool:
    """Return whether a folder's run has this work to do, or has done it."""
    return bool(_record(run_dir).get("work_hash") == work)


def marks_in(record: Mapping[str, Any]) -> list[str]:
    """Return the marks of the launches that a run.json knows of."""
    marks = record.get("launches")
    return [str(one) for one in marks] if isinstance(marks, list) else []


def _record(run_dir: Path) -> dict[str, Any]:
    """Return a folder's run.json; empty where there is none, or where it is damaged."""
    if not (run_dir / RUN_RECORD).exists():
        return {}
    try:
        return read_run_record(run_dir)
    except UserError:
        return {}  # no run that anybody can go on with


def _agent() -> str:
    """Return the process that started this rank: host, boot, number and when it was started."""
    pid = os.getppid()
    boot = BOOT_ID.read_text().strip()[:8] if BOOT_ID.exists() else "-"
    return f"agent {socket.gethostname()} {boot} {pid} {_started(pid)}"


def _started(pid: int) -> str:
    """Return when a process was started, in ticks since the boot: numbers are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "-"  # no /proc, as on macOS
    return text.rpartition(")")[2].split()[19]
