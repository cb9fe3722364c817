"""This machine's load from other work. Torch-free.

A speed measured beside other work means little, so a comparison shows the load.
"""

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass

from ddp_runner.host.processes import PROC, process_stats

IDLE, IOWAIT, STEAL = 3, 4, 7  # fields of a line of /proc/stat (man 5 proc_stat)
# Fields of `process_stats`: the parent; CPU time of the process and of its ended children.
PARENT, CPU_TIME, CHILDREN_TIME = 0, slice(10, 12), slice(12, 14)


@dataclass(frozen=True)
class Load:
    """The machine's load at one instant; times are in clock ticks since boot."""

    average_1m: float  # processes that run or wait
    cores_ticks: tuple[int, ...] = ()  # of the cores this process may use; empty: not Linux
    ranks_ticks: int = 0  # CPU time of this machine's ranks


def measure_load() -> Load:
    """Return the load now. This is cheap: it reads a few files below /proc."""
    average = round(os.getloadavg()[0], 2)
    if sys.platform != "linux" or not (PROC / "stat").exists():
        return Load(average)
    return Load(average, _cores_ticks(os.sched_getaffinity(0)), _ranks_ticks(os.getppid()))


def load_record(start: Load, end: Load) -> dict[str, dict[str, float | None]]:
    """Return the load of a run for run.json.

    The shares say which part of the cores' time from `start` to `end` other processes used, and
    which part a hypervisor gave to other machines (steal). None: unknown.
    """
    counters = zip(start.cores_ticks, end.cores_ticks, strict=False)  # empty if unknown
    ticks = [after - before for before, after in counters]
    total, busy, steal = sum(ticks), None, None
    if total > 0:
        others = total - ticks[IDLE] - ticks[IOWAIT] - ticks[STEAL]
        others -= end.ranks_ticks - start.ranks_ticks
        busy = round(max(0.0, others) / total, 3)
        steal = round(ticks[STEAL] / total, 3)
    return {
        "start": {"loadavg_1m": start.average_1m},
        "end": {"loadavg_1m": end.average_1m, "busy_share_others": busy, "steal_share": steal},
    }


def _cores_ticks(cores: Collection[int]) -> tuple[int, ...]:
    """Return the first eight counters of /proc/stat, summed over cores; user includes guests."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in (PROC / "stat").read_text().splitlines()]
    counters = [[int(field) for field in line[1:9]] for line in lines if line and line[0] in names]
    return tuple(map(sum, zip(*counters, strict=True)))


def _ranks_ticks(parent: int) -> int:
    """Return the CPU time of the children of a process, such as all ranks of a launcher.

    Ended children count through their parent: other ranks may end before rank 0 measures.
    """
    ticks = 0
    for pid, fields in process_stats():
        if fields[PARENT] == parent:
            ticks += sum(fields[CPU_TIME])
        if parent in (fields[PARENT], pid):
            ticks += sum(fields[CHILDREN_TIME])
    return ticks
