"""What a process does with its devices at its end."""

import atexit
import json
import os
from pathlib import Path

from simgpu.native import library

DRAIN_S = 10.0  # a collective whose other ranks have gone may take for ever


def register() -> None:
    """Let the process wait for its streams at its end, and write its waits if told to."""
    atexit.register(_end)


def _end() -> None:
    if not library.is_initialized():
        return
    if path := os.environ.get("SIMGPU_WAITS_FILE"):
        line = json.dumps({"rank": os.environ.get("RANK"), "waits": library.waits()})
        with Path(f"{path}.{os.getpid()}").open("a") as file:
            file.write(f"{line}\n")
    library.drain(DRAIN_S)  # else their threads would run while the process is taken apart
