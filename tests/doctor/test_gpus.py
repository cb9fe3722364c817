"""The GPUs, from what nvidia-smi prints; this machine may have none."""

from pathlib import Path

import pytest

from ddp_runner.doctor import gpus
from ddp_runner.doctor.finding import Level
from ddp_runner.host.hardware import Hardware

TWO = "0, NVIDIA H200, 143771, 4, 570.1\n1, NVIDIA H200, 143771, 90000, 570.1\n"
NVLINK = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\t{far}\tNODE\t0-55
GPU1\tNV18\t X \tNV18\tNODE\t0-55
GPU2\t{far}\tNV18\t X \tNODE\t0-55
NIC0\tSYS\tSYS\tSYS\t X \t
"""


def fake(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, hardware: Hardware, query: str, topo: str = ""
) -> None:
    """Put a nvidia-smi first in the path that prints this, and GPUs in place of the machine's."""
    program = folder / "nvidia-smi"
    (folder / "query").write_text(query)
    (folder / "topo").write_text(topo)
    case = f'case "$1" in topo) cat {folder}/topo;; *) cat {folder}/query;; esac'
    program.write_text(f"#!/bin/sh\n{case}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(gpus, "detect", lambda: hardware)
    monkeypatch.setattr(gpus, "torch_build", lambda: {"cuda": "12.8"})


def test_gpus_are_listed_with_their_links_and_what_others_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs, one of them busy."""
    topo = NVLINK.format(far="NV18")
    fake(monkeypatch, tmp_path, hardware=Hardware(2, 8), query=TWO, topo=topo)
    devices, memory, links = gpus.gpus()
    assert devices.value == "2 x NVIDIA H200, torch for CUDA 12.8, driver 570.1"
    assert (memory.level, memory.value) == (
        Level.WARNING,
        "in use: GPU 1: 90,000 of 143,771 MiB",
    )
    assert (links.level, links.value) == (Level.OK, "3 GPUs, at slowest by NV18")


@pytest.mark.parametrize(("far", "level"), [("NV6", Level.OK), ("SYS", Level.WARNING)])
def test_pairs_that_go_through_the_cpu_beside_nvlink_are_a_warning(far: str, level: Level) -> None:
    """Only the columns of GPUs count."""
    (finding,) = gpus.links(NVLINK.format(far=far))
    assert finding.level == level
    assert far in finding.value or level == Level.OK


@pytest.mark.parametrize("text", ["", "No devices were found\n", "GPU0\n", "GPU0\t X \n"])
def test_a_matrix_without_pairs_is_nothing_to_report(text: str) -> None:
    """One GPU, or another version of nvidia-smi."""
    assert list(gpus.links(text)) == []


def test_gpus_that_are_hidden_or_unusable_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what hides them, or by the fix."""
    fake(monkeypatch, tmp_path, hardware=Hardware(0, 8), query=TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (hidden,) = gpus.gpus()
    assert (hidden.level, hidden.value) == (
        Level.WARNING,
        "none visible, and the driver has 2",
    )
    fake(monkeypatch, tmp_path, hardware=Hardware(0, 8), query="")
    (none,) = gpus.gpus()
    assert none.level == Level.OK
    broken = Hardware(0, 8, "the driver is too old; update it")
    fake(monkeypatch, tmp_path, hardware=broken, query=TWO)
    (unusable,) = gpus.gpus()
    assert (unusable.level, unusable.value) == (Level.PROBLEM, broken.unusable)
