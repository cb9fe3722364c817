"""The GPUs of this machine, from torch's point of view and from the driver's. Torch-free."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from ddp_runner.doctor.finding import LIMIT_S, Finding, ok, problem, warning
from ddp_runner.errors import counted
from ddp_runner.host.hardware import detect, torch_build

QUERY = "index,name,memory.total,memory.used,driver_version"
USED_SHARE = 0.1  # of a GPU's memory that others may use
# How nvidia-smi names the way between two GPUs, the fastest first.
LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
OVER_CPU = ("PHB", "NODE", "SYS")


def gpus() -> Iterator[Finding]:
    """Yield what ranks can compute on, and what connects the GPUs."""
    hardware, listed = (
        detect(),
        _nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"),
    )
    if hardware.unusable is not None:
        yield problem("GPUs", hardware.unusable, "see the value: it names the fix")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    rows = [row for row in rows if len(row) == QUERY.count(",") + 1]
    if hardware.num_gpus == 0:
        if rows:
            asked = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            yield warning(
                "GPUs",
                f"none visible, and the driver has {len(rows)}",
                f"CUDA_VISIBLE_DEVICES is {asked}: unset it, or ask the scheduler for GPUs",
            )
        else:
            yield ok("GPUs", "none: ranks compute on the CPU, over gloo")
        return
    cuda = torch_build().get("cuda")
    names = ", ".join(sorted({row[1] for row in rows})) or "unknown to nvidia-smi"
    driver = f", driver {rows[0][4]}" if rows else ""
    yield ok("GPUs", f"{hardware.num_gpus} x {names}, torch for CUDA {cuda}{driver}")
    yield from _memory(rows)
    if hardware.num_gpus > 1:
        yield from links(_nvidia_smi("topo", "-m"))


def _memory(rows: list[list[str]]) -> Iterator[Finding]:
    used = {row[0]: (int(row[3]), int(row[2])) for row in rows if (row[2] + row[3]).isdigit()}
    busy = [
        f"GPU {index}: {taken:,} of {total:,} MiB"
        for index, (taken, total) in used.items()
        if taken > USED_SHARE * total
    ]
    if busy:
        advice = "another program uses them: end it, or leave these GPUs out (CUDA_VISIBLE_DEVICES)"
        yield warning("GPU memory", f"in use: {', '.join(busy)}", advice)
    elif used:
        yield ok("GPU memory", f"{min(total for _, total in used.values()):,} MiB each, free")


def links(matrix: str) -> Iterator[Finding]:
    """Yield the slowest connection of two GPUs, from the matrix of `nvidia-smi topo -m`.

    Its words: https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s+\S", line)]
    rows = [row for row in rows if "X" in row]
    cells = [cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"]
    kinds = [kind for kind in LINKS if any(cell.startswith(kind) for cell in cells)]
    if not kinds:
        return
    slowest = sorted({cell for cell in cells if cell.startswith(kinds[-1])})[0]
    value = f"{counted(len(rows), 'GPU')}, at slowest by {slowest}"
    if kinds[-1] in OVER_CPU and "NV" in kinds:
        advice = (
            "some pairs have NVLink and some go through the CPU: place ranks that talk side by "
        )
        yield warning("GPU links", value, f"{advice}side")
    else:
        yield ok("GPU links", value)


def _nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; nothing without it, or if it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(
        ["nvidia-smi", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S / 4,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""
