"""Accelerators, cores and memory of this machine; finds NVIDIA GPUs without torch."""

import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ddp_runner.host.processes import import_errors, kernel_text, start_fork_server

CUDA = "cuda"  # NVIDIA's GPUs, and AMD's by ROCm
# By kind, as in torch.distributed.get_default_backend_for_device. MPS has no backend of its own.
BACKENDS = {CUDA: "nccl", "xpu": "xccl", "mps": "gloo"}
FOR_CPU = ("gloo", "mpi")  # backends that move CPU tensors
CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# By kind: the variable that lists the GPUs that a process sees.
VISIBLE = {CUDA: "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
GET_TORCH = "https://pytorch.org/get-started/locally/"
Accelerators = tuple[str, int, str]  # torch's device type, number of devices, backend


@cache
def known_to_torch(*, is_rank: bool) -> Accelerators | str:
    """Return the accelerators that torch sees, or why it cannot tell.

    Only a rank, which computes on them, imports torch here. Another process asks a child.
    """
    if is_rank:
        return _ask_torch()
    pipe, child_end = Pipe()
    with pipe, child_end:
        try:
            start_fork_server()
            process = ForkServerProcess(target=_send_answer, args=(child_end,))
            process.start()
            child_end.close()
            answer: Accelerators | str = pipe.recv()
            process.join()
            return answer
        except (EOFError, OSError):  # a driver ended the process, or its server
            return "the process that asks torch for accelerators has ended; see the lines above"


def _send_answer(pipe: Connection) -> None:
    pipe.send(_ask_torch())


def _ask_torch() -> Accelerators | str:
    if import_errors:
        return f"torch cannot say which GPUs it sees ({import_errors[0]}); repair its install"
    try:
        import torch
        import torch.distributed as dist

        if (device := torch.accelerator.current_accelerator(check_available=True)) is None:
            return CUDA, 0, BACKENDS[CUDA]
        backends = dist.Backend.default_device_backend_map | BACKENDS
        backend = backends.get(device.type, FOR_CPU[0])
        return device.type, torch.accelerator.device_count(), backend
    except Exception as error:  # whatever a broken driver makes torch raise
        return f"torch cannot say which GPUs it sees ({error!r:.200}); repair its install"


@dataclass(frozen=True)
class Hardware:
    """The devices and cores that this process may use."""

    num_gpus: int  # accelerators of any kind that torch can compute on
    num_cores: int  # cores that this process may keep busy
    unusable: str | None = None  # why torch cannot use the visible GPUs, and the fix
    binds_gpus: bool = False  # Slurm shows each task its own GPUs only
    kind: str = CUDA  # torch's device type of these GPUs; cuda if there are none
    backend: str = BACKENDS[CUDA]  # for their tensors; gloo if they have no other

    def share(self, num_slots: int) -> "Hardware":
        """Return the hardware of each slot; a remainder stays idle, so that all slots are equal."""
        num_gpus, num_cores = self.num_gpus // num_slots, self.num_cores // num_slots
        return replace(self, num_gpus=num_gpus, num_cores=num_cores)


def detect(*, is_rank: bool = False) -> Hardware:
    """Return the usable GPUs and the cores of this process; a rank may import torch for that."""
    num_visible, driver_cuda = _cuda_driver()
    build, binds = torch_build(), binds_gpus(os.environ)
    unusable = why_unusable(num_visible, driver_cuda, build)
    devices: Accelerators | str = (CUDA, 0 if unusable else num_visible, BACKENDS[CUDA])
    if sys.platform == "darwin":
        devices = ("mps", int(platform.machine() == "arm64"), BACKENDS["mps"])
    elif (unusable or not num_visible) and (
        build.get("hip") or build.get("xpu") or entry_points(group="torch.backends")
    ):
        devices = known_to_torch(is_rank=is_rank)
    if isinstance(devices, str):
        return Hardware(0, usable_cores(), devices, binds)
    kind, count, backend = devices
    return Hardware(count, usable_cores(), None if count else unusable, binds, kind, backend)


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity mask and its CPU quota.

    Slurm may grant a job some cores without binding it to them, so its grant is a limit as well.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    limits = [quota_cores() or sys.maxsize, int(granted) if granted.isdigit() else sys.maxsize]
    return max(1, min(len(os.sched_getaffinity(0)), *limits))


def _cuda_driver() -> tuple[int, int]:
    """Return the number of visible CUDA devices, and the driver's CUDA version (12.4: 12040)."""
    # Unlike NVML, the driver applies CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG slices). These
    # calls create no context, so they take no GPU memory.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # a machine without NVIDIA's driver
        return 0, 0
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0, 0
    driver.cuDriverGetVersion(ctypes.byref(version))
    return count.value, version.value


def torch_build() -> dict[str, str | None]:
    """Return the cuda, hip and xpu versions that torch was built for, from its version file."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    pairs = re.findall(r"""^(cuda|hip|xpu)\b.*=\s*(None|["'].*["'])""", text, re.MULTILINE)
    return {key: None if value == "None" else value.strip("\"'") for key, value in pairs}


def why_unusable(num_visible: int, driver_cuda: int, build: Mapping[str, str | None]) -> str | None:
    """Return why torch cannot compute on this machine's NVIDIA GPUs, and the fix; None: it can.

    See ``_cuda_driver`` and ``torch_build`` for the arguments.
    """
    cuda = build.get(CUDA, "")
    if build.get("hip") or num_visible == 0 or cuda == "":
        return None
    noun = "GPU is" if num_visible == 1 else "GPUs are"
    if not cuda:
        return (
            f"{num_visible} {noun} visible and torch was built without CUDA; install a build "
            f"with CUDA ({GET_TORCH})"
        )
    # Within a major version every driver serves every runtime:
    # https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    major, minor = driver_cuda // 1000, driver_cuda % 1000 // 10
    if driver_cuda and major < int(cuda.partition(".")[0]):
        return (
            f"{num_visible} {noun} visible and the driver (CUDA {major}.{minor}) is too old for "
            f"torch (CUDA {cuda}); update it, or install a torch for CUDA {major} ({GET_TORCH})"
        )
    return None


def binds_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm shows each task its own GPUs only (srun --gpus-per-task, --gpu-bind).

    Ranks of torchrun share the GPUs of the task that started it.
    """
    if "SLURM_PROCID" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return False
    if "SLURM_GPU_BIND" in environ:
        return "none" not in environ["SLURM_GPU_BIND"]
    return "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")


def quota_cores() -> int | None:
    """Return the CPU quota of this process's cgroups in cores, rounded down; None: no limit.

    Every group up to the root sets a limit, by cpu.max (version 2) or the other files (version 1).
    """
    names, quotas = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"), list[int]()
    for group in own_cgroups("cpu"):
        fields = " ".join(kernel_text(group / name) for name in names).split()
        if len(fields) == 2 and all(map(str.isdigit, fields)):  # neither "max" nor -1
            quotas.append(int(fields[0]) // int(fields[1]))
    return max(1, min(quotas)) if quotas else None


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use, by its cgroups and ``ulimit``."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in own_cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            text = kernel_text(group / name).strip()
            limits += [int(text)] if text.isdigit() else []  # not "max"
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min(limits + [limit for limit in soft if limit != resource.RLIM_INFINITY])


def own_cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups for a controller, from the innermost up.

    In a container the path may be the host's; then some of the folders do not exist.
    """
    for line in kernel_text(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for name in (controllers, controller) if controllers else ("", "unified"):
            folder = CGROUPS / name / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(CGROUPS):
                    yield group


def core_shares(num_slots: int, *, num_cores: int) -> list[tuple[int, ...]]:
    """Return disjoint, equal parts of this process's cores, `num_cores` in all. Linux only."""
    assert sys.platform == "linux"  # ``Local.validate`` ensures it
    cores = sorted(os.sched_getaffinity(0), key=_topology)
    size, distance = num_cores // num_slots, len(cores) // num_slots
    return [tuple(sorted(cores[distance * i :][:size])) for i in range(num_slots)]


def gpu_shares(num_slots: int, hardware: Hardware) -> list[dict[str, str]]:
    """Return disjoint, equal parts of the visible GPUs, each as the variable that selects it."""
    if hardware.num_gpus == 0 or hardware.kind not in VISIBLE:
        return [{}] * num_slots
    variable = VISIBLE[hardware.kind]
    if variable == VISIBLE[CUDA] and torch_build().get("hip"):
        variable = "HIP_VISIBLE_DEVICES"  # has precedence over CUDA's
    visible = os.environ.get(variable)
    names = visible.split(",") if visible else list(map(str, range(hardware.num_gpus)))
    size = hardware.num_gpus // num_slots
    return [{variable: ",".join(names[size * i : size * (i + 1)])} for i in range(num_slots)]


def _topology(core: int) -> tuple[int, int, int]:
    """Return a sort key that keeps the hyperthreads of one physical core together."""
    folder = CPUS / f"cpu{core}" / "topology"
    package, physical = (
        kernel_text(folder / name).strip() for name in ("physical_package_id", "core_id")
    )
    if not (package.isdigit() and physical.isdigit()):
        return 0, core, core  # unknown, as in some containers
    return int(package), int(physical), core
