"""The command ``python -m ddp_runner.doctor``: what this machine is fit for.

It prints what torch reports of the machine (``torch.utils.collect_env``), then what runs need.
Torch-free until then.
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
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED
from ddp_runner.tracking.outputs import OUTPUTS
from ddp_runner.tracking.provenance import versions
from ddp_runner.tracking.run_dir import MIN_FREE_MIB

MEMINFO, SHARED_MEMORY = Path("/proc/meminfo"), Path("/dev/shm")
GIB = 2**30
LEAST_MEMORY = 2 * GIB  # a rank takes about half a GiB before it has a model
LEAST_SHARED = GIB  # Docker gives 64 MiB, and loading workers pass whole batches through it
NO_GPUS = "none: ranks compute on the CPU, over gloo"
LEAST_FREE = 5 * GIB  # some checkpoints of a small model


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    value: str
    problem: str = ""  # runs fail; how to fix it
    warning: str = ""  # runs work, but slower, or not in every case; how to fix it


def main() -> None:
    """Run the command and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Examine this machine, print the report, and return the exit code: 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.doctor",
        description="Check this machine. Whether machines reach each other: task=collectives.",
        epilog="Exit code: 0 if there is no problem, else 1; 2 for a mistake in the command.",
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
            found = check()
        except Exception as error:  # whatever a broken machine makes a library raise
            found = Finding(typed(error), problem="see the error")
        num_problems += bool(found.problem)
        num_warnings += bool(found.warning)
        level = "problem" if found.problem else "warning" if found.warning else "ok"
        print(f"{level:<7}  {name:<13}  {printable(found.value)}", flush=True)
        if level != "ok":
            print(f"{'':24}-> {found.problem or found.warning}")
    print(f"{counted(num_problems, 'problem')}, {counted(num_warnings, 'warning')}")
    return EXIT_FAILED if num_problems else EXIT_COMPLETED


def backends() -> Finding:
    """Print torch's own report; return the backends by which ranks can talk."""
    import torch
    import torch.distributed as dist
    from torch.utils.collect_env import get_pretty_env_info

    print(get_pretty_env_info(), end="\n\n")
    found = ["gloo"] if dist.is_gloo_available() else []
    if (kind := torch.accelerator.current_accelerator(check_available=True)) is not None:
        own = dist.get_default_backend_for_device(kind.type)
        found += [f"{own} for {kind.type}"] if dist.is_backend_available(own) else []
    found += ["MPI"] if dist.is_mpi_available() else []
    fix = "" if "gloo" in found else "install a torch with gloo, by which ranks agree"
    return Finding(", ".join(found) or "none", problem=fix)


def software() -> Finding:
    """Return the versions of what runs are made of."""
    found = versions()
    fix = "" if all(found.values()) else "install ddp_runner again"
    named = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    return Finding(named, problem=fix)


def gpus() -> Finding:
    """Return what ranks compute on."""
    hardware, visible = detect(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if hardware.unusable is not None:
        reason, _, fix = hardware.unusable.partition("; ")
        return Finding(reason, problem=fix)
    number = f"{hardware.num_gpus} ({hardware.kind})" if hardware.num_gpus else NO_GPUS
    return Finding(number + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"))


def cores() -> Finding:
    """Return how many cores ranks may keep busy, and whether others do already."""
    num_present, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = "other programs keep them busy: speeds mean little" if load > num_present / 2 else ""
    return Finding(f"{usable_cores()} of {num_present}; load {load:.1f}", warning=busy)


def memory() -> Finding:
    """Return how much memory this process may use, and how much of the machine's is free."""
    allowed = memory_bytes()
    text = MEMINFO.read_text() if MEMINFO.exists() else ""
    found = re.search(r"^MemAvailable: +(\d+) kB", text, re.MULTILINE)
    free = min(allowed, int(found[1]) * 1024) if found else allowed
    fix = "end other programs, or raise the container's limit" if free < LEAST_MEMORY else ""
    return Finding(f"{_gib(free)} free of {_gib(allowed)} that it may use", warning=fix)


def shared_memory() -> Finding:
    """Return how much fits into /dev/shm, through which loading workers pass their batches."""
    if not SHARED_MEMORY.is_dir():
        return Finding("not Linux")
    free = shutil.disk_usage(SHARED_MEMORY).free
    fix = (
        "loading workers die of a bus error when it is full: start the container with "
        "--shm-size=8g (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    )
    return Finding(f"{_gib(free)} free", warning=fix if free < LEAST_SHARED else "")


def disk(outputs: Path) -> Finding:
    """Return what is free on the disk of the runs, and whether files can be locked there."""
    place = outputs.absolute()
    place = next(one for one in (place, *place.parents) if one.exists())
    free = shutil.disk_usage(place).free
    value = f"{place}: {_gib(free)} free"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        fix = "runs write and lock files there: use another folder (NFS: mounted without nolock)"
        return Finding(f"{value}; {error.strerror}", problem=fix)
    if free < MIN_FREE_MIB * 2**20:
        return Finding(value, problem=f"free some: a run needs {MIN_FREE_MIB} MiB to start")
    few = "checkpoints may fill it: free some, or use another disk" if free < LEAST_FREE else ""
    return Finding(value, warning=few)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


if __name__ == "__main__":
    main()
