"""This process's memory: its limit, the kernel's kills, and its freed blocks. Torch-free."""

import ctypes
import os
import re
import resource

from ddp_runner.host.hardware import own_cgroups
from ddp_runner.host.processes import kernel_text

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
USER_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
MIB = 2**20


def address_limit() -> str:
    """Return the limit of ``ulimit -v`` as a cause of failed allocations; empty without one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"ulimit -v allows each process {limit / 2**30:.1f} GiB of addresses; raise it"


def oom_kills() -> int:
    """Return how often the kernel has killed a process of this cgroup for memory; 0: unknown.

    The nearest group that has a counter decides.
    """
    for group in own_cgroups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            if match := re.search(r"^oom_kill (\d+)", kernel_text(group / name), re.MULTILINE):
                return int(match[1])
    return 0


def keep_freed_memory() -> None:
    """Keep the memory that a step frees for the next step.

    By default glibc returns the end of its heap whenever a few MiB of it are free. A step that
    frees its activations then makes the system map and clear the same memory again. Another C
    library stays as it is, and so do thresholds that the user has set.
    """
    if USER_VARIABLES.isdisjoint(os.environ):
        _set_thresholds(mapped=32 * MIB, trimmed=256 * MIB)  # glibc maps from 32 MiB at most


def return_freed_memory() -> bool:
    """Map each large tensor separately, for the rest of the process; False without glibc.

    Otherwise glibc cannot reuse freed memory for an aligned tensor of the same size, unless it is
    next to other free memory. A rank that gathers and frees block by block grows until it holds
    more than the whole model.
    """
    return _set_thresholds(mapped=MIB // 8, trimmed=MIB // 8)


def _set_thresholds(*, mapped: int, trimmed: int) -> bool:
    """Set the bytes from which a tensor is mapped separately, and the heap is trimmed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, mapped) and mallopt(M_TRIM_THRESHOLD, trimmed))
