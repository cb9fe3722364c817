"""glibc's thresholds for freed memory: keep it for the next step, or return it to the system."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
USER_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
MIB = 2**20


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
