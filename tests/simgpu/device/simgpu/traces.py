"""Where the host waits: with SIMGPU_TRACE=item,copy,… a line for each wait of such a name."""

import os
import traceback
from pathlib import Path

from simgpu.native import library

LEVELS = 4  # of the callers in ddp_runner that a line names


def start() -> None:
    """Watch the counts if SIMGPU_TRACE names some."""
    if not (watched := os.environ.get("SIMGPU_TRACE")):
        return
    path = os.environ.get("SIMGPU_TRACE_FILE", "simgpu-trace")

    def write(name: str) -> None:
        if any(part in name for part in watched.split(",")):
            with Path(f"{path}.{os.getpid()}").open("a") as file:
                file.write(f"{name} at {_callers()}\n")

    library.watch(write)


def _callers() -> str:
    stack = traceback.extract_stack()[:-2]
    ours = [frame for frame in stack if "ddp_runner" in frame.filename][-LEVELS:]
    frames = [*stack[-1:], *reversed(ours)]
    if not frames:
        return "autograd"  # whose threads are C++
    return " < ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in frames)


def _short(path: str) -> str:
    return path.rpartition("site-packages/")[2].rpartition("ddp_runner/")[2]
