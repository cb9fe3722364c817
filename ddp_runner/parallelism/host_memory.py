"""Gives memory that is freed on the CPU back to the system at once (glibc)."""

import ctypes

from ddp_runner.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
SMALLEST_MAPPED = 128 * 2**10  # bytes; what glibc begins with


def return_freed_memory() -> None:
    """Map each large tensor by itself, for the rest of the process.

    By default glibc raises the threshold with what is freed, keeps such memory, and cannot use it
    again for an aligned tensor of the same size: a rank that gathers and frees block by block grows
    until it holds more than the whole model.

    Raises:
        UserError: the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)
    if mallopt is None or not all(mallopt(option, SMALLEST_MAPPED) for option in options):
        raise UserError(
            "parallelism.return_memory=true needs glibc, the C library of most Linux systems, and "
            "this machine has another; leave it out"
        )
