"""The command ``python -m ddp_runner.doctor``: checks this machine for runs.

It prints torch's report (``torch.utils.collect_env``), then its own checks. Imports torch late.
"""

import argparse
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddp_runner.errors import counted, printable, typed
from ddp_runner.host.hardware import detect, memory_bytes, usable_cores
from ddp_runner.host.processes import kernel_text
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED
from ddp_runner.tracking.outputs import OUTPUTS
from ddp_runner.tracking.run_dir import MIN_FREE_MIB
from ddp_runner.tracking.run_record import versions

MEMINFO, SHARED_MEMORY = Path("/proc/meminfo"), Path("/dev/shm")
GIB = 2**30
MIN_MEMORY = 2 * GIB  # a rank takes about half a GiB without a model
MIN_SHARED = GIB  # Docker's default, 64 MiB, is too little for the loading workers' batches
NO_GPUS = "none: ranks compute on the CPU, over gloo"
MIN_FREE = 5 * GIB  # several checkpoints of a small model


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    value: str
    problem: str = ""  # how to fix what makes runs fail
    warning: str = ""  # how to fix what makes runs slow, or some runs fail


def main() -> None:
    """Run the command and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Check this machine, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.doctor",
        description="Check this machine. task=collectives checks the network between machines.",
        epilog="Exit code: 0; 1 if there is a problem; 2 for a mistake in the command.",
    )
    outputs = "folder of the runs (default: outputs)"
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, metavar="FOLDER", help=outputs)
    folder = parser.parse_args(arguments).outputs
    checks: dict[str, Callable[[], Finding]] = {
        "backends": backends,
        "software": software,
        "GPUs": gpus,
        "cores": cores,
        "memory": memory,
        "shared memory": shared_memory,
        "outputs": partial(disk, folder),
    }
    num_problems = num_warnings = 0
    for name, check in checks.items():
        try:
            finding = check()
        except Exception as error:  # a broken library raises any class
            finding = Finding(typed(error), problem="see the error")
        num_problems += bool(finding.problem)
        num_warnings += bool(finding.warning)
        level = "problem" if finding.problem else "warning" if finding.warning else "ok"
        print(f"{level:<7}  {name:<13}  {printable(finding.value)}", flush=True)
        if level != "ok":
            print(f"{'':24}-> {finding.problem or finding.warning}")
    print(f"{counted(num_problems, 'problem')}, {counted(num_warnings, 'warning')}")
    return EXIT_FAILED if num_problems else EXIT_COMPLETED


def backends() -> Finding:
    """Print torch's own report; return the backends of torch.distributed."""
    import torch
    import torch.distributed as dist
    from torch.utils.collect_env import get_pretty_env_info

    print(get_pretty_env_info(), end="\n\n")
    names = ["gloo"] if dist.is_gloo_available() else []
    if (kind := torch.accelerator.current_accelerator(check_available=True)) is not None:
        default = dist.get_default_backend_for_device(kind.type)
        names += [f"{default} for {kind.type}"] if dist.is_backend_available(default) else []
    names += ["MPI"] if dist.is_mpi_available() else []
    fix = "" if "gloo" in names else "install a torch with gloo: every run needs it"
    return Finding(", ".join(names) or "none", problem=fix)


def software() -> Finding:
    """Return the versions of the packages that runs need."""
    packages = versions()
    fix = "" if all(packages.values()) else "install ddp_runner again"
    texts = [f"{name} {version or 'missing'}" for name, version in packages.items()]
    return Finding(", ".join(texts), problem=fix)


def gpus() -> Finding:
    """Return the number of GPUs, or why torch cannot use them."""
    hardware, visible = detect(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if hardware.unusable is not None:
        reason, _, fix = hardware.unusable.partition("; ")
        return Finding(reason, problem=fix)
    number = f"{hardware.num_gpus} ({hardware.kind})" if hardware.num_gpus else NO_GPUS
    return Finding(number + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"))


def cores() -> Finding:
    """Return how many cores this process may use, and the load."""
    num_present, load = os.cpu_count() or 1, os.getloadavg()[0]
    fix = "other programs keep them busy: measured speeds mean little"
    text = f"{usable_cores()} of {num_present}; load {load:.1f}"
    return Finding(text, warning=fix if load > num_present / 2 else "")


def memory() -> Finding:
    """Return how much memory this process may use, and how much is free."""
    allowed = memory_bytes()
    match = re.search(r"^MemAvailable: +(\d+) kB", kernel_text(MEMINFO), re.MULTILINE)
    free = min(allowed, int(match[1]) * 1024) if match else allowed
    fix = "end other programs, or raise the container's limit" if free < MIN_MEMORY else ""
    return Finding(f"{_gib(free)} free of {_gib(allowed)}", warning=fix)


def shared_memory() -> Finding:
    """Return how much fits into /dev/shm; loading workers pass their batches through it."""
    if not SHARED_MEMORY.is_dir():
        return Finding("not Linux")
    free = shutil.disk_usage(SHARED_MEMORY).free
    fix = (
        "loading workers die of a bus error when it is full: start the container with "
        "--shm-size=8g (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    )
    return Finding(f"{_gib(free)} free", warning=fix if free < MIN_SHARED else "")


def disk(outputs: Path) -> Finding:
    """Return the free space on the disk of the runs, and whether files can be locked there."""
    path = outputs.absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    value = f"{folder}: {_gib(free)} free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # for example NFS without locks
        fix = "runs write and lock files there: use another folder (NFS: mounted without nolock)"
        return Finding(f"{value}; {error.strerror}", problem=fix)
    if free < MIN_FREE_MIB * 2**20:
        return Finding(value, problem=f"free some: a run needs {MIN_FREE_MIB} MiB to start")
    fix = "checkpoints may fill it: free some, or use another disk" if free < MIN_FREE else ""
    return Finding(value, warning=fix)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


if __name__ == "__main__":
    main()
