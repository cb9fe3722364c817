"""Memory that is given back to the system when it is freed."""

import ctypes
import subprocess
import sys

import pytest

from ddp_runner.errors import UserError
from ddp_runner.parallelism.host_memory import return_freed_memory

NUM_BLOCKS = 100  # of a MiB
# Smaller blocks between large ones pin the memory around them. The first to be freed tells glibc to
# keep what is as large. A process of its own: another may have holes that are large enough.
KEPT_MIB = """
import ctypes, sys
from pathlib import Path
from ddp_runner.parallelism.host_memory import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident_mib():
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in one)
    return int(line.split()[1]) / 1024

if sys.argv[2] == "returned":
    return_freed_memory()
libc.free(libc.malloc(2**20))
before, large, small = resident_mib(), [], []
for _ in range(int(sys.argv[1])):
    large.append(libc.malloc(2**20))
    libc.memset(large[-1], 1, 2**20)
    small.append(libc.malloc(100_000))  # too large for an old hole
for block in large:
    libc.free(block)
print(resident_mib() - before)
"""


def kept_mib(how: str) -> float:
    """Return how much memory a process keeps of blocks that it has freed."""
    command = [sys.executable, "-c", KEPT_MIB, str(NUM_BLOCKS), how]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is a C library of Linux")
def test_freed_memory_goes_back_only_on_request() -> None:
    """Without the call the process keeps nearly all of it."""
    assert kept_mib("kept") > NUM_BLOCKS / 2
    assert kept_mib("returned") < NUM_BLOCKS / 10


def test_another_c_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of macOS and Alpine have no such call."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.raises(UserError, match=r"parallelism\.return_memory=true needs glibc"):
        return_freed_memory()
