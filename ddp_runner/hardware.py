"""What this machine has, asked without importing torch, so that a mistake is answered at once."""

import ctypes
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """The devices and cores that this process may use."""

    num_gpus: int
    num_cores: int


def detect() -> Hardware:
    """Return the visible CUDA devices and the cores of this process's affinity mask."""
    if sys.platform == "linux":
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return Hardware(num_gpus=_num_cuda_devices(), num_cores=num_cores)


def _num_cuda_devices() -> int:
    # The driver itself applies CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG slices), which is why it
    # is asked instead of NVML. No context is created: no GPU memory is taken here.
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
