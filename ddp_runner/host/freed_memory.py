"""Whether the C library keeps memory that is freed, or gives it back; glibc alone."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
CHOSEN = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}  # a user's variables
MIB = 2**20
LARGEST_KEPT = 32 * MIB  # the most that glibc takes
MOST_KEPT = 256 * MIB  # at the end of the heap: the tensors of a step go and come again


def keep_freed_memory() -> None:
    """Keep what a step frees, for the next one.

    By default glibc gives the end of its heap back whenever a few MiB of it are free. A step that
    frees its activations then has the system map and clear the same memory again. Another C
    library is left as it is, and so are thresholds that the user has chosen.
    """
    if not CHOSEN.isdisjoint(os.environ):
        return
    _set_thresholds(mapped=LARGEST_KEPT, trimmed=MOST_KEPT)


def return_freed_memory() -> bool:
    """Map each large tensor by itself, for the rest of the process; False: it is not glibc.

    Else glibc cannot use freed memory again for an aligned tensor of the same size, unless it is
    next to other free memory. A rank that gathers and frees block by block grows until it holds
    more than the whole model.
    """
    return _set_thresholds(mapped=MIB // 8, trimmed=MIB // 8)


def _set_thresholds(*, mapped: int, trimmed: int) -> bool:
    """Set the bytes from which a tensor is mapped by itself, and the heap is made smaller."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, mapped) and mallopt(M_TRIM_THRESHOLD, trimmed))
