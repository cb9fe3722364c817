"""What this machine has, asked without importing torch, so that a mistake is answered at once."""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Hardware:
    """The devices and cores that this process may use."""

    num_gpus: int
    num_cores: int

    def share(self, num_slots: int) -> "Hardware":
        """Return what each of so many slots has; a remainder lies idle, so that all are alike."""
        return Hardware(self.num_gpus // num_slots, self.num_cores // num_slots)


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


def core_shares(num_slots: int) -> list[tuple[int, ...]]:
    """Return disjoint, equal parts of this process's cores. Linux only."""
    assert sys.platform == "linux"  # elsewhere `check_sweep` has refused it
    cores = sorted(os.sched_getaffinity(0), key=_place)
    size = len(cores) // num_slots
    return [tuple(sorted(cores[size * i : size * (i + 1)])) for i in range(num_slots)]


def gpu_shares(
    num_slots: int, *, num_gpus: int, environ: Mapping[str, str] | None = None
) -> list[str | None]:
    """Return disjoint, equal parts of the visible GPUs as values of CUDA_VISIBLE_DEVICES.

    Where there are no GPUs the variable is to be left as it is: None.
    """
    if num_gpus == 0:
        return [None] * num_slots
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(num_gpus)))
    size = num_gpus // num_slots
    return [",".join(names[size * i : size * (i + 1)]) for i in range(num_slots)]


def _place(core: int) -> tuple[int, int, int]:
    """Return where a core sits: hyperthreads of one physical core belong to one slot."""
    try:
        package, physical = (
            int((CPUS / f"cpu{core}" / "topology" / name).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, core, core  # not said, as in some containers
    return package, physical, core
