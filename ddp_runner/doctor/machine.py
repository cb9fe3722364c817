"""This machine without its network and disks: software, cores, memory, limits. Torch-free."""

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ddp_runner.doctor.finding import Finding, ok, problem, warning
from ddp_runner.errors import counted
from ddp_runner.host.hardware import detect, memory_bytes
from ddp_runner.host.temp_folder import MOST_CHARACTERS, OWNER, PREFIX
from ddp_runner.tracking.provenance import versions

MEMINFO, SHARED_MEMORY = Path("/proc/meminfo"), Path("/dev/shm")
INFINIBAND, PROC = Path("/sys/class/infiniband"), Path("/proc")
GIB = 2**30
LEAST_MEMORY = 2 * GIB  # a rank takes about half a GiB before it has a model
LEAST_SHARED = GIB  # Docker gives 64 MiB, and loading workers pass whole batches through it
LEAST_TEMP = GIB
LEAST_FILES, LEAST_PROCESSES = 1024, 4096
QUIET = "TORCH_CPP_LOG_LEVEL"  # the command sets it: torch's C++ code repeats what a look reports
SHOWN = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "MASTER_", "DDP_RUNNER_", "SLURM_JOB_ID")
LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "core file": resource.RLIMIT_CORE,
}


def software() -> Iterator[Finding]:
    """Yield the versions of what runs are made of."""
    found = versions()
    missing = [name for name, version in found.items() if version is None]
    listed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if missing:
        yield problem("software", f"not installed: {', '.join(missing)}", "install ddp_runner anew")
    yield ok("software", f"{listed}, {platform.system()} {platform.release()}")


def cores() -> Iterator[Finding]:
    """Yield how many cores ranks may keep busy, and whether others do already."""
    num_cores, num_present = detect().num_cores, os.cpu_count() or 1
    value = counted(num_cores, "core")
    if num_cores < num_present:
        value += f" of {num_present}, by the affinity mask or the cgroup's quota"
    load = os.getloadavg()[0]
    if load > num_present / 2:
        yield warning(
            "cores",
            f"{value}; load {load:.1f}",
            "other programs keep them busy: speeds mean little",
        )
    else:
        yield ok("cores", f"{value}; load {load:.1f}")


def memory() -> Iterator[Finding]:
    """Yield how much memory this process may use, and how much of the machine's is free."""
    allowed = memory_bytes()
    text = MEMINFO.read_text() if MEMINFO.exists() else ""
    found = re.search(r"^MemAvailable: +(\d+) kB", text, re.MULTILINE)
    free = min(allowed, int(found[1]) * 1024) if found else allowed
    value = f"{gib(free)} free of {gib(allowed)} that it may use"
    if free < LEAST_MEMORY:
        yield warning("memory", value, "end other programs, or raise the container's limit")
    else:
        yield ok("memory", value)


def shared_memory() -> Iterator[Finding]:
    """Yield how much fits into /dev/shm, through which loading workers pass their batches."""
    if not SHARED_MEMORY.is_dir():
        return  # not Linux
    usage = shutil.disk_usage(SHARED_MEMORY)
    value = f"{gib(usage.free)} free of {gib(usage.total)}"
    if usage.free < LEAST_SHARED:
        yield warning(
            "shared memory",
            value,
            "loading workers die of a bus error when it is full: start the container with "
            "--shm-size=8g (Kubernetes: an emptyDir with medium Memory at /dev/shm)",
        )
    else:
        yield ok("shared memory", value)


def limits() -> Iterator[Finding]:
    """Yield the limits of this process, as `ulimit` sets them."""
    soft = {name: resource.getrlimit(kind)[0] for name, kind in LIMITS.items()}
    value = ", ".join(f"{name} {_limit(name, limit)}" for name, limit in soft.items())
    few = {"open files": (LEAST_FILES, "-n"), "processes": (LEAST_PROCESSES, "-u")}
    too_low = [
        f"ulimit {option} {least}"
        for name, (least, option) in few.items()
        if soft[name] != resource.RLIM_INFINITY and soft[name] < least
    ]
    if INFINIBAND.is_dir() and soft["locked memory"] != resource.RLIM_INFINITY:
        too_low.append("ulimit -l unlimited (InfiniBand registers memory)")
    if too_low:
        yield warning("limits", value, f"raise them: {', '.join(too_low)}")
    else:
        yield ok("limits", value)


def _limit(name: str, limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{limit:,}" if name in ("open files", "processes") else gib(limit)


def temp() -> Iterator[Finding]:
    """Yield whether sockets and scratch files fit into the temporary folder."""
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    value = f"{folder}, {gib(free)} free"
    if free < LEAST_TEMP:
        yield warning("temp folder", value, "free some, or set TMPDIR to a folder with space")
    elif len(str(folder)) > MOST_CHARACTERS:
        yield warning(
            "temp folder",
            value,
            f"longer than {MOST_CHARACTERS} characters, so /tmp is used: set a shorter TMPDIR",
        )
    else:
        yield ok("temp folder", value)


def leftovers() -> Iterator[Finding]:
    """Yield what killed runs have left on this machine."""
    folders = [one for one in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if is_abandoned(one)]
    segments = [
        path.name
        for path in (SHARED_MEMORY.glob("torch_*") if SHARED_MEMORY.is_dir() else ())
        if (found := re.match(r"torch_(\d+)_", path.name)) and not (PROC / found[1]).exists()
    ]
    if segments:
        yield warning(
            "leftovers",
            f"{counted(len(segments), 'file')} in {SHARED_MEMORY} of no process that is seen here",
            # With --ipc=host they may be of processes that live in another container.
            f"delete them if no other container uses them: rm {SHARED_MEMORY / segments[0]}",
        )
    elif folders:
        where = counted(len(folders), "temporary folder")
        yield ok("leftovers", f"{where} of killed runs, which the next start removes")
    else:
        yield ok("leftovers", "none")


def is_abandoned(folder: Path) -> bool:
    """Return whether the launcher of a temporary folder was killed on this host."""
    with suppress(OSError):  # another user's, or removed right now
        if (folder / OWNER).read_text().partition("\n")[0] != socket.gethostname():
            return False
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        finally:
            os.close(descriptor)
    return False


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the variables that change how ranks start, meet and talk."""
    found = [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(SHOWN) and name != QUIET
    ]
    yield ok("variables", " ".join(found) or "none that change a launch")


def gib(num_bytes: float) -> str:
    """Return a number of bytes in GiB; in MiB if it is small."""
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"
