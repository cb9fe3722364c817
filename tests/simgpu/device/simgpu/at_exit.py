"""What a process does with its devices at its end."""

import atexit
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from simgpu.native import library

DRAIN_S = 10.0  # a collective whose other ranks have gone may take for ever


def register() -> None:
    """Let the process wait for its streams at its end, and write its waits if told to."""
    atexit.register(_drain)
    if path := os.environ.get("SIMGPU_WAITS_FILE"):
        atexit.register(_write_waits, path)
        _write_before_exit(path)


def _drain() -> None:
    # Else the streams' threads would run while the process is taken apart.
    if library.is_initialized() and (hung := library.drain(DRAIN_S)):
        print(f"simgpu: {hung} was not done {DRAIN_S:g} s after the end", file=sys.stderr)


def _write_waits(path: str) -> None:
    if library.is_initialized():
        line = json.dumps({"rank": os.environ.get("RANK"), "waits": library.waits()})
        with Path(f"{path}.{os.getpid()}").open("a") as file:
            file.write(f"{line}\n")


def _write_before_exit(path: str) -> None:
    # Ranks end by os._exit, which runs nothing else.
    end = os._exit

    def write_and_end(status: int) -> NoReturn:
        _write_waits(path)
        end(status)

    os._exit = write_and_end
