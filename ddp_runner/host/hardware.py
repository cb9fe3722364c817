"""GPUs and other accelerators, cores and memory of this machine; NVIDIA GPUs without torch."""

import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ddp_runner.host.processes import import_errors, start_fork_server

CUDA = "cuda"  # NVIDIA's, and AMD's by ROCm
# The backend of each kind, as of torch.distributed.get_default_backend_for_device. MPS has none.
BACKENDS = {CUDA: "nccl", "xpu": "xccl", "mps": "gloo"}
FOR_CPU = ("gloo", "mpi")  # backends that move CPU tensors
Accelerators = tuple[str, int, str]  # torch's device type, how many, and their backend


@cache
def known_to_torch(*, is_rank: bool) -> Accelerators | str:
    """Return the accelerators that torch sees, or why it cannot say.

    This process stays without torch, unless it `is_rank` and will compute on them.
    """
    if is_rank:
        return _ask()
    pipe, theirs = Pipe()
    with pipe, theirs:
        try:
            start_fork_server()
            process = ForkServerProcess(target=_answer, args=(theirs,))
            process.start()
            theirs.close()
            answer: Accelerators | str = pipe.recv()
            process.join()
        except (EOFError, OSError):
            return "the process that asks torch for accelerators has ended; see the lines above"
    return answer


def _answer(pipe: Connection) -> None:
    pipe.send(_ask())


def _ask() -> Accelerators | str:
    if import_errors:
        return f"torch cannot say which GPUs it sees ({import_errors[0]}); repair its install"
    try:
        import torch
        import torch.distributed as dist

        if (found := torch.accelerator.current_accelerator(check_available=True)) is None:
            return CUDA, 0, BACKENDS[CUDA]
        known = dist.Backend.default_device_backend_map | BACKENDS
        return found.type, torch.accelerator.device_count(), known.get(found.type, FOR_CPU[0])
    except Exception as error:  # whatever a broken driver makes torch raise
        return f"torch cannot say which GPUs it sees ({error!r:.200}); repair its install"


CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# By kind: the variable that names the GPUs which a process sees.
VISIBLE = {CUDA: "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
GET_TORCH = "https://pytorch.org/get-started/locally/"


@dataclass(frozen=True)
class Hardware:
    """The devices and cores that this process may use."""

    num_gpus: int  # that torch can compute on, of any kind
    num_cores: int  # that this process may keep busy
    unusable: str | None = None  # why torch cannot use the visible GPUs, and the fix
    binds_gpus: bool = False  # Slurm shows each task its own GPUs only
    kind: str = CUDA  # torch's device type of these GPUs; without any, NVIDIA's
    backend: str = BACKENDS[CUDA]  # that moves their tensors; gloo: none does

    def share(self, num_slots: int) -> "Hardware":
        """Return the hardware of each slot; a remainder stays idle, so that all slots are equal."""
        num_gpus, num_cores = self.num_gpus // num_slots, self.num_cores // num_slots
        return replace(self, num_gpus=num_gpus, num_cores=num_cores)


def detect(*, is_rank: bool = False) -> Hardware:
    """Return the usable GPUs and the cores of this process; `is_rank`: it will compute on them."""
    num_visible, driver_cuda = _cuda_driver()
    build, binds = torch_build(), binds_gpus(os.environ)
    unusable = why_unusable(num_visible, driver_cuda, build)
    found: Accelerators | str = (CUDA, 0 if unusable else num_visible, BACKENDS[CUDA])
    if sys.platform == "darwin":
        found = ("mps", int(platform.machine() == "arm64"), BACKENDS["mps"])
    elif (unusable or not num_visible) and (
        build.get("hip") or build.get("xpu") or entry_points(group="torch.backends")
    ):
        found = known_to_torch(is_rank=is_rank)
    if isinstance(found, str):
        return Hardware(0, usable_cores(), found, binds)
    kind, number, backend = found
    return Hardware(number, usable_cores(), None if number else unusable, binds, kind, backend)


def usable_cores() -> int:
    """Return the cores that this process may keep busy: of the affinity mask, up to the CPU quota.

    Slurm may give a job some cores of a machine and bind it to none; then its number counts.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    limits = [quota_cores() or sys.maxsize, int(granted) if granted.isdigit() else sys.maxsize]
    return max(1, min(len(os.sched_getaffinity(0)), *limits))


def _cuda_driver() -> tuple[int, int]:
    """Return how many CUDA devices are visible, and the driver's CUDA version (12.4: 12040)."""
    # The driver, unlike NVML, applies CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG slices). These
    # calls create no context, so they take no GPU memory.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0, 0
    driver.cuDriverGetVersion(ctypes.byref(version))
    return count.value, version.value


def torch_build() -> dict[str, str | None]:
    """Return what the installed torch was built for (cuda, hip, xpu), from its version file."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.findall(r"""^(cuda|hip|xpu)\b.*=\s*(None|["'].*["'])""", text, re.MULTILINE)
    return {key: None if value == "None" else value.strip("\"'") for key, value in found}


def why_unusable(num_visible: int, driver_cuda: int, build: Mapping[str, str | None]) -> str | None:
    """Return why torch cannot compute on this machine's NVIDIA GPUs, and the fix; None: it can.

    The arguments are what ``_cuda_driver`` and ``torch_build`` return.
    """
    cuda = build.get(CUDA, "")
    if build.get("hip") or num_visible == 0 or cuda == "":
        return None
    noun = "GPU is" if num_visible == 1 else "GPUs are"
    if not cuda:
        return (
            f"{num_visible} {noun} visible and torch was built without CUDA; install one that was "
            f"built with it ({GET_TORCH})"
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
    """Return how many cores the CPU quota of this process's cgroups is worth; None: no limit.

    Every group up to the root limits it: cpu.max (version 2), cpu.cfs_quota_us (version 1). The
    result is rounded down, but is at least 1.
    """
    found = [quota for group in own_groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, int(min(found))) if found else None


def memory_bytes() -> int:
    """Return how much memory this process may use: the machine's, up to its limits.

    Limits come from its cgroups, memory.max (version 2) and memory.limit_in_bytes (version 1), and
    from ulimit -v and -d.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in own_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # there is no file, or it holds "max"
                found.append(int((group / name).read_text()))
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min(found + [limit for limit in soft if limit != resource.RLIM_INFINITY])


def own_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups for a controller, from the innermost up.

    In a container the path may be the host's; then some of the folders do not exist.
    """
    text = OWN_CGROUPS.read_text(encoding="utf-8") if OWN_CGROUPS.exists() else ""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for name in (controllers, controller) if controllers else ("", "unified"):
            folder = CGROUPS / name / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(CGROUPS):
                    yield group


def _quota(group: Path) -> float | None:
    """Return a cgroup's CPU quota as a number of cores; None: no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError):
        return None  # there is no file, or it holds "max"


def core_shares(num_slots: int, *, num_cores: int) -> list[tuple[int, ...]]:
    """Return disjoint, equal parts of this process's cores, num_cores in all. Linux only."""
    assert sys.platform == "linux"  # `validate_sweep` ensures it
    cores = sorted(os.sched_getaffinity(0), key=_place)
    size, distance = num_cores // num_slots, len(cores) // num_slots
    return [tuple(sorted(cores[distance * i :][:size])) for i in range(num_slots)]


def gpu_shares(num_slots: int, hardware: Hardware) -> list[dict[str, str]]:
    """Return disjoint, equal parts of the visible GPUs, each as the variable that shows no others.

    Without GPUs the variables stay as they are.
    """
    if hardware.num_gpus == 0 or hardware.kind not in VISIBLE:
        return [{}] * num_slots
    variable = VISIBLE[hardware.kind]
    if variable == VISIBLE[CUDA] and torch_build().get("hip"):
        variable = "HIP_VISIBLE_DEVICES"  # it comes before CUDA's
    visible = os.environ.get(variable)
    names = visible.split(",") if visible else list(map(str, range(hardware.num_gpus)))
    size = hardware.num_gpus // num_slots
    return [{variable: ",".join(names[size * i : size * (i + 1)])} for i in range(num_slots)]


def _place(core: int) -> tuple[int, int, int]:
    """Return a sort key that keeps the hyperthreads of one physical core together."""
    try:
        topology = CPUS / f"cpu{core}" / "topology"
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core  # unknown, as in some containers
