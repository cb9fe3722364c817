"""A run goes on where the devices are others: on a CPU, on another kind, without its plug-in."""

from pathlib import Path

import pytest
from configs import LAPTOP, config_error, freeze, resolved

from ddp_runner.host.hardware import Hardware
from ddp_runner.tracking.run_record import write_run_record

NPU = Hardware(num_gpus=4, num_cores=4, kind="npu", backend="hccl")


def run_of(machine: Hardware, folder: Path) -> str:
    """Return the words that resume a run of two ranks that has begun on a machine."""
    config, _ = resolved("model=toy", "world_size=2", hardware=machine)
    write_run_record(folder, status="preempted")
    choices = {"model": "toy", "optimizer": "sgd", "scheduler": "constant"}
    freeze(folder, config, choices=choices)
    return f"resume={folder}"


@pytest.mark.parametrize(
    ("began", "there", "word", "expected"),
    [
        (NPU, NPU, "backend.device=cpu", ("gloo", "cpu")),
        (NPU, LAPTOP, "backend.device=cpu", ("gloo", "cpu")),
        (NPU, LAPTOP, "backend=auto", ("gloo", "cpu")),
        (LAPTOP, NPU, "backend.device=npu", ("hccl", "npu")),
        (LAPTOP, NPU, "backend.device=auto", ("hccl", "npu")),
        (LAPTOP, NPU, "seed=0", ("gloo", "cpu")),
        (NPU, NPU, "seed=0", ("hccl", "npu")),
    ],
)
def test_a_device_brings_its_own_backend(
    began: Hardware, there: Hardware, word: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    """The one that the run had need not be named, and need not exist any more."""
    config, _ = resolved(run_of(began, tmp_path), word, hardware=there)
    assert (config.backend.name, config.backend.device) == expected


def test_a_backend_that_is_not_there_any_more_is_named_with_what_to_write(tmp_path: Path) -> None:
    """The shell may lack the plug-in that brought it."""
    line = config_error(run_of(NPU, tmp_path), hardware=LAPTOP)
    assert line.startswith("backend.name (hccl) must be one of auto, gloo, mpi, nccl, xccl; ")
    assert line.endswith("write backend=auto")
