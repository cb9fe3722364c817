"""Software, cores, memory, limits and leftovers, with a machine that is not as it should be."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest

from ddp_runner.doctor import machine
from ddp_runner.doctor.finding import Finding, Level
from ddp_runner.host.hardware import Hardware

Usage = namedtuple("Usage", "total used free")
MIB = 2**20


def only(findings: Iterable[Finding]) -> Finding:
    """Return the only finding."""
    (finding,) = findings
    return finding


def test_the_software_is_listed_and_what_is_missing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel."""
    assert "torch 2." in only(machine.software()).value
    found = {"python": "3.12.1", "torch": None, "hydra-core": "1.3.8"}
    monkeypatch.setattr(machine, "versions", lambda: found)
    missing, rest = machine.software()
    assert (missing.level, missing.value) == (Level.PROBLEM, "not installed: torch")
    assert rest.value.startswith("python 3.12.1, hydra-core 1.3.8, ")


@pytest.mark.parametrize(("load", "level"), [(0.5, Level.OK), (7.0, Level.WARNING)])
def test_cores_that_others_use_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, load: float, level: Level
) -> None:
    """And fewer cores than the machine has are explained."""
    monkeypatch.setattr(machine, "detect", lambda: Hardware(0, 4))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    finding = only(machine.cores())
    assert finding.level == level
    assert finding.value.startswith("4 cores of 8, by the affinity mask or the cgroup's quota")


@pytest.mark.parametrize(
    ("available_kib", "allowed", "level", "value"),
    [
        (8 * MIB, 64 * machine.GIB, Level.OK, "8.0 GiB free of 64.0 GiB that it may use"),
        (MIB, 64 * machine.GIB, Level.WARNING, "1.0 GiB free of 64.0 GiB that it may use"),
        (8 * MIB, 512 * MIB, Level.WARNING, "512 MiB free of 512 MiB that it may use"),
    ],
)
def test_little_memory_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    available_kib: int,
    allowed: int,
    level: Level,
    value: str,
) -> None:
    """The machine's free memory counts, up to the container's limit."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {available_kib} kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "memory_bytes", lambda: allowed)
    finding = only(machine.memory())
    assert (finding.level, finding.value) == (level, value)


def test_the_shared_memory_of_a_container_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives 64 MiB unless it is told otherwise."""
    small = Usage(64 * MIB, 0, 64 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    finding = only(machine.shared_memory())
    assert (finding.level, finding.value) == (Level.WARNING, "64 MiB free of 64 MiB")
    assert "--shm-size" in str(finding.advice)


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        ({}, None),
        ({"open files": 256}, "raise them: ulimit -n 1024"),
        ({"open files": 256, "processes": 9}, "raise them: ulimit -n 1024, ulimit -u 4096"),
    ],
)
def test_low_limits_are_named_with_their_option(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], advice: str | None
) -> None:
    """No limit is no warning."""
    by_kind = {machine.LIMITS[name]: limit for name, limit in limits.items()}
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (by_kind.get(kind, unlimited),) * 2)
    finding = only(machine.limits())
    assert finding.advice == advice
    assert "core file unlimited" in finding.value
    assert (finding.level == Level.OK) == (advice is None)


def test_locked_memory_matters_to_infiniband_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most systems limit it to some MiB."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path / "none")
    finding = only(machine.limits())
    assert (finding.level, "locked memory 8 MiB" in finding.value) == (Level.OK, True)
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    assert "ulimit -l unlimited" in str(only(machine.limits()).advice)


@pytest.mark.parametrize(
    ("length", "free", "says"),
    [(0, 2 * machine.GIB, None), (60, 2 * machine.GIB, "shorter TMPDIR"), (0, MIB, "free some")],
)
def test_a_long_or_full_temporary_folder_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, length: int, free: int, says: str | None
) -> None:
    """Sockets lie in it, and their paths must be short."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/" + "x" * length)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    finding = only(machine.temp())
    assert (finding.level == Level.OK) == (says is None)
    assert (says or "") in str(finding.advice)


def test_leftovers_of_killed_processes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of a launcher or a worker that lives."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / f"torch_{os.getpid()}_12_0").touch()
    assert only(machine.leftovers()).value == "none"
    folder = tmp_path / "ddp_runner-abc"
    folder.mkdir()
    (folder / "owner").write_text(f"{socket.gethostname()}\nprocess 1\n")
    program = (
        "import fcntl, os, sys; d = os.open(sys.argv[1], os.O_RDONLY); "
        "fcntl.flock(d, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert only(machine.leftovers()).value == "none"
    finding = only(machine.leftovers())
    assert finding.level == Level.OK
    assert finding.value == "1 temporary folder of killed runs, which the next start removes"
    (tmp_path / "shm" / "torch_999999999_12_0").touch()
    finding = only(machine.leftovers())
    assert finding.level == Level.WARNING
    assert finding.advice == (
        f"delete them if no other container uses them: rm {tmp_path / 'shm'}/torch_999999999_12_0"
    )


def test_only_variables_of_a_launch_are_shown() -> None:
    """No others, which may be secret."""
    environ = {"NCCL_DEBUG": "INFO", "API_KEY": "secret", "MASTER_PORT": "1"}
    assert only(machine.variables(environ)).value == "MASTER_PORT=1 NCCL_DEBUG=INFO"
