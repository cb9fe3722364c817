"""``python -m ddp_runner.doctor`` prints torch's report and checks what runs need."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_runner import doctor
from ddp_runner.doctor import GIB, Finding
from ddp_runner.host.hardware import Hardware


def disk_with(monkeypatch: pytest.MonkeyPatch, *, free: float) -> None:
    """Make every disk have some bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


@pytest.mark.full
def test_it_examines_this_machine(tmp_path: Path) -> None:
    """With torch's own report in front; nothing is left in the folder."""
    command = [sys.executable, "-m", "ddp_runner.doctor"]
    end = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert end.stderr == ""
    assert end.stdout.startswith("PyTorch version: ")
    *_, report = end.stdout.partition("\n\nok       backends")
    lines = report.splitlines()
    assert lines[0].strip().startswith("gloo")
    names = [line[9:22].strip() for line in lines[1:-1] if not line.startswith(" ")]
    assert names == ["software", "GPUs", "cores", "memory", "shared memory", "outputs"]
    assert end.returncode == (0 if lines[-1].startswith("0 problems, ") else 1)
    assert not list(tmp_path.iterdir())


def test_a_check_that_fails_is_a_problem_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exits with 1."""

    def broken() -> Finding:
        raise OSError("libtorch.so: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "backends", broken)
    monkeypatch.setattr(doctor, "cores", lambda: Finding("2 of 2", warning="they are busy"))
    disk_with(monkeypatch, free=100 * GIB)
    assert doctor.run(["--outputs", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "problem  backends       OSError: libtorch.so: cannot open shared object file",
        f"{'':24}-> see the error",
    ]
    assert "warning  cores          2 of 2" in lines
    assert lines[-1].startswith("1 problem, ")


def test_gpus_that_torch_cannot_use_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the fix that the launcher names, too."""
    why = "2 GPUs are visible and torch was built without CUDA; install one that was"
    monkeypatch.setattr(doctor, "detect", lambda: Hardware(0, 4, unusable=why))
    finding = doctor.gpus()
    assert (finding.value, finding.problem) == tuple(why.split("; "))
    monkeypatch.setattr(doctor, "detect", lambda: Hardware(2, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert doctor.gpus() == Finding("2 (cuda); CUDA_VISIBLE_DEVICES=3,4")


def test_a_package_that_is_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the package."""
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2.15.0", "omegaconf": None})
    finding = doctor.software()
    assert finding.value == "torch 2.15.0, omegaconf missing"
    assert finding.problem


def test_little_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's memory counts, and the memory that loading workers share."""
    monkeypatch.setattr(doctor, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 8 * GIB)
    assert doctor.memory() == Finding("8.0 GiB free of 8.0 GiB")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  1048576 kB\n")
    assert doctor.memory().warning
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    disk_with(monkeypatch, free=GIB / 16)
    assert "--shm-size" in doctor.shared_memory().warning


def test_the_disk_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space may be too little to start, little or enough; the folder need not exist yet."""
    outputs = tmp_path / "outputs" / "later"
    disk_with(monkeypatch, free=GIB / 1024)
    assert doctor.disk(outputs).problem.startswith("free some")
    disk_with(monkeypatch, free=GIB)
    assert doctor.disk(outputs).warning
    disk_with(monkeypatch, free=100 * GIB)
    assert doctor.disk(outputs) == Finding(f"{tmp_path}: 100.0 GiB free")
    monkeypatch.setattr(doctor.fcntl, "flock", _no_locks)
    finding = doctor.disk(outputs)
    assert finding.value.endswith("; No locks available")
    assert "nolock" in finding.problem


def _no_locks(*_: object) -> None:
    raise OSError(37, os.strerror(37))
