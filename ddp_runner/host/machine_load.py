"""How busy this machine is with other work, and its kills for memory, from the kernel's counters.

A speed measured beside other work means little, so the comparison needs to know. Torch-free.
"""

import os
import re
import resource
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from ddp_runner.host.hardware import own_groups
from ddp_runner.host.processes import PROC, process_stats

IDLE, IOWAIT, STEAL = 3, 4, 7  # fields of a line of /proc/stat (man 5 proc_stat)
# Fields of `process_stats`: the parent; own time, and that of its ended children, in clock ticks.
PARENT, OWN, ENDED = 0, slice(10, 12), slice(12, 14)


@dataclass(frozen=True)
class Load:
    """The machine at one instant; times are sums since boot, in clock ticks."""

    average_1m: float | None  # processes that run or wait; None: unknown
    cores_ticks: tuple[int, ...] = ()  # of the cores this process may use; empty: not Linux
    ranks_ticks: int = 0  # CPU time of this machine's ranks


def measure_load() -> Load:
    """Return the load now. Cheap: reads a few files below /proc."""
    try:
        average = round(os.getloadavg()[0], 2)
    except OSError:
        return Load(None)
    if sys.platform != "linux" or not (PROC / "stat").exists():
        return Load(average)
    return Load(average, _cores_ticks(os.sched_getaffinity(0)), _ranks_ticks(os.getppid()))


def load_record(start: Load, end: Load) -> dict[str, dict[str, float | None]]:
    """Return the load of a run for run.json.

    The shares are of the time of the cores that the run may use, from `start` to `end`: what other
    processes took, and what a hypervisor gave to other machines (steal). None: unknown.
    """
    pairs = zip(start.cores_ticks, end.cores_ticks, strict=False)  # empty if unknown
    spent = [after - before for before, after in pairs]
    total, others, steal = sum(spent), None, None
    if total > 0:
        busy = total - spent[IDLE] - spent[IOWAIT] - spent[STEAL]
        others = round(max(0.0, busy - (end.ranks_ticks - start.ranks_ticks)) / total, 3)
        steal = round(spent[STEAL] / total, 3)
    return {
        "start": {"loadavg_1m": start.average_1m},
        "end": {"loadavg_1m": end.average_1m, "busy_share_others": others, "steal_share": steal},
    }


def address_limit() -> str:
    """Return why a process may get no memory under ``ulimit -v``; empty if there is no limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return ""
    return f"ulimit -v allows each process {most / 2**30:.1f} GiB of addresses; raise it"


def oom_kills() -> int:
    """Return how often the kernel has killed a process of this cgroup for memory; 0: unknown.

    If the cgroup has no counter, the nearest one above it counts: memory.events (version 2),
    memory.oom_control (version 1).
    """
    for group in own_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):  # of the other version, or missing
                found = re.search(r"^oom_kill (\d+)", (group / name).read_text(), re.MULTILINE)
                if found:
                    return int(found[1])
    return 0


def _cores_ticks(cores: Collection[int]) -> tuple[int, ...]:
    """Return the first eight counters of /proc/stat, summed over cores; guest time is in user."""
    wanted = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in (PROC / "stat").read_text().splitlines()]
    counters = [[int(field) for field in line[1:9]] for line in lines if line and line[0] in wanted]
    return tuple(map(sum, zip(*counters, strict=True)))


def _ranks_ticks(parent: int) -> int:
    """Return the CPU time of a process's children: one launcher starts all ranks of a machine.

    Ended ranks count through their parent: other ranks may end before rank 0 measures.
    """
    ticks = 0
    for pid, fields in process_stats():
        if fields[PARENT] == parent:
            ticks += sum(fields[OWN])
        if parent in (fields[PARENT], pid):
            ticks += sum(fields[ENDED])
    return ticks
