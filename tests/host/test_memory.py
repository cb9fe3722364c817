"""Memory: the kernel's kills are counted; freed blocks are kept, or returned to the system."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_runner.host import hardware
from ddp_runner.host.memory import keep_freed_memory, oom_kills, return_freed_memory

NUM_BLOCKS = 100  # of a MiB
# The first large block to be freed tells glibc to keep what is as large. Smaller blocks between
# large ones make holes of them; without, they are the end of the heap. It is a new process: another
# may have holes that are large enough.
KEPT_MIB = """
import ctypes, sys
from pathlib import Path
from ddp_runner.host import memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident_mib():
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in one)
    return int(line.split()[1]) / 1024

num_blocks, how, where = sys.argv[1:]
if how != "default":
    getattr(memory, how)()
libc.free(libc.malloc(2**20))
before, large, small = resident_mib(), [], []
for _ in range(int(num_blocks)):
    large.append(libc.malloc(2**20))
    libc.memset(large[-1], 1, 2**20)
    if where == "holes":
        small.append(libc.malloc(100_000))  # too large for an old hole
for block in large:
    libc.free(block)
print(resident_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is a C library of Linux")
@pytest.mark.parametrize(
    ("how", "where", "is_kept"),
    [
        ("default", "holes", True),
        ("return_freed_memory", "holes", False),
        ("default", "end", False),
        ("keep_freed_memory", "end", True),
    ],
)
def test_freed_memory_is_kept_or_given_back(
    how: str, where: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call does the opposite of what glibc does by itself."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    command = [sys.executable, "-c", KEPT_MIB, str(NUM_BLOCKS), how, where]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kept_mib = float(done.stdout)
    assert kept_mib > NUM_BLOCKS / 2 if is_kept else kept_mib < NUM_BLOCKS / 10


def test_a_setting_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets a threshold by hand has a reason."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("it was changed"))
    keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of macOS and Alpine have no such call."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    keep_freed_memory()
    assert not return_freed_memory()


@pytest.mark.parametrize(
    ("groups", "files", "kills"),
    [
        (
            "0::/user/run\n",
            {"user/memory.events": "low 0\noom 9\noom_kill 8\n", "memory.events": "oom_kill 9\n"},
            8,  # its own group has no counter, as where it has no memory controller
        ),
        ("0::/\n", {"memory.events": "oom 2\noom_kill 1\noom_group_kill 0\n"}, 1),  # a container's
        (
            "4:memory:/jobs/7\n1:cpu:/\n0::/\n",
            {
                "memory/jobs/7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
                "memory/memory.oom_control": "oom_kill 5\n",
                "cpu/memory.oom_control": "oom_kill 7\n",
            },
            3,
        ),
        # A container with the host's path, of which only the group's own folder is there.
        ("4:memory:/docker/ab\n", {"memory/memory.oom_control": "oom_kill 2\n"}, 2),
        ("4:memory:/\n", {"memory/memory.oom_control": "oom_kill_disable 0\n"}, 0),  # Linux < 4.13
        ("0::/\n", {}, 0),
    ],
    ids=["v2-above", "v2-container", "v1", "v1-container", "v1-old", "none"],
)
def test_kills_for_memory_are_counted_in_the_own_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], kills: int
) -> None:
    """If it has no counter, the nearest group above it that has one counts, in both versions."""
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "fs")
    assert oom_kills() == kills
