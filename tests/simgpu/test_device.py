"""The simulated GPU shows what it claims to show; see programs.py for what each answer is of."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import simgpu_build

pytestmark = [pytest.mark.simgpu, pytest.mark.full]
PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs' files."""
    return tmp_path_factory.mktemp("simgpu")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """Return what the programs saw, all in one process: torch takes seconds to import."""
    files = {"SIMGPU_WAITS_FILE": str(folder / "waits"), "SIMGPU_TRACE_FILE": str(folder / "trace")}
    more = {"SIMGPU_TRACE": "event.synchronize", "SIMGPU_SIDE_DELAY_US": "2000000"}
    return simgpu_build.answers(PROGRAMS, str(folder), **more, **files)


def test_the_host_cannot_touch_device_memory(seen: dict[str, Any]) -> None:
    """SIGSEGV kills who reads it; pinned memory is the host's own."""
    assert seen["host_reads"] == [-11, 0]


def test_a_forked_process_is_rejected(seen: dict[str, Any]) -> None:
    """If its parent has used a device: for new tensors and for its parent's."""
    assert seen["forks"] == [3, 3]


def test_memory_is_nan_until_written(seen: dict[str, Any]) -> None:
    """Fresh memory and memory that was used before."""
    assert seen["unwritten"] == [True, True]


def test_a_missing_wait_between_streams_shows(seen: dict[str, Any]) -> None:
    """NaN is read without it; wait_event and wait_stream make it right."""
    found = seen["streams"]
    assert all(math.isnan(number) for number in found["without"])
    assert (found["event"], found["stream"]) == ([1.0] * 4, [2.0] * 4)
    assert found["done"] is False
    assert found["order"]


def test_a_missing_wait_for_a_stream_without_work_shows(seen: dict[str, Any]) -> None:
    """Its tasks are late until something waits for them."""
    without, waited = seen["late"]
    assert all(math.isnan(number) for number in without)
    assert waited == [1.0] * 4


def test_a_stream_is_idle_once_the_host_has_waited_for_it(seen: dict[str, Any]) -> None:
    """Whatever its thread still does."""
    assert seen["queries"]


def test_a_missing_record_stream_shows(seen: dict[str, Any]) -> None:
    """Freed memory is overwritten while another stream reads it, unless that is recorded."""
    without, recorded, unused = seen["freed"]
    assert without == [True, 14.0]  # the same address, and twice what the next tensor wrote
    assert recorded == [False, 2.0]
    assert math.isnan(unused[1])  # though nobody has the memory again


def test_a_tensor_grows_on_its_own_device(seen: dict[str, Any]) -> None:
    """By a copy in its stream, whatever the current device is."""
    assert seen["resized"] == [[1.0] * 4, [0, 4096 - 512]]


def test_torch_rejects_mistakes_at_once(seen: dict[str, Any]) -> None:
    """Wrong shapes, and results that would be a CPU's; what follows is computed."""
    errors, after = seen["rejected"]
    sizes = "The size of tensor a [{}] must match the size of tensor b [{}]"
    devices = "Expected all tensors to be on the same device"
    assert errors == [sizes.format(4, 3), sizes.format(3, 4), devices, devices]
    assert after == [2.0] * 4


def test_copies_keep_the_rules_of_cuda(seen: dict[str, Any]) -> None:
    """Pinned memory is read and written later; pageable memory is read at once, or waited for."""
    found = seen["copies"]
    assert found["from pinned"] == [5.0, 0, {"async h2d": 1}]
    assert found["from pageable"] == [1.0, 0, {"pageable h2d": 1}]
    assert found["to pinned"] == [0.0, {}, {"async d2h": 1}]
    assert found["to pinned, later"] == 3.0
    assert found["to pageable"] == [3.0, {"copy d2h, non_blocking to pageable": 1}, {}]


def test_pinned_memory_lives_as_long_as_its_copies(seen: dict[str, Any]) -> None:
    """The tensor's end does not change what a copy reads, and after the copy nothing is held."""
    is_pinned, while_used, arrived, afterwards = seen["pinned"]
    assert is_pinned == [True, True, False, True]
    assert (while_used, arrived, afterwards) == (4000, True, 0)


def test_a_collective_blocks_the_stream_and_not_the_host(seen: dict[str, Any]) -> None:
    """The host passes wait() while the collective has not begun; the stream sees its result."""
    before, is_done, waits, after = seen["collective"]
    assert math.isnan(before)
    assert (is_done, waits, after) == (False, 0, 1.0)


def test_two_ranks_meet(seen: dict[str, Any]) -> None:
    """The device's backend is simccl, with means, reduce_scatter, gather and send."""
    means = [[0.5] * 4, [0.5] * 4, [1] * 4]  # of whole numbers as NCCL's
    values = [*means, [0.0, 2.0], [0.0, 2.0, 4.0, 6.0], [6.0]]
    gaps = "Tensors must be contiguous"
    expected = {"backend": "simccl", "values": values, "waits": {}, "gaps": gaps}
    assert seen["two_ranks"] == expected


def test_memory_has_an_end(seen: dict[str, Any]) -> None:
    """More than a device has, or than its share, is torch.OutOfMemoryError."""
    assert seen["out_of_memory"] == ["simgpu out of memory"] * 2


def test_it_computes_what_the_cpu_does(seen: dict[str, Any]) -> None:
    """A training's loss, the types of autocast, and random numbers that a seed repeats."""
    on_cpu, on_device, types, (first, second) = seen["training"]
    assert on_device == pytest.approx(on_cpu, rel=1e-5)
    assert types[:3] == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert "unsafe to autocast" in types[3]
    assert first == second
    assert first[0] != first[1]


def test_waits_are_counted(seen: dict[str, Any], folder: Path) -> None:
    """Each cause by its name, and none for a training step; a file and a trace have them, too."""
    none, waits = seen["waits"]
    assert none == {}
    assert waits == {
        "copy d2h": 1,
        "copy h2d": 2,  # a tensor and a list of indexes
        "device.synchronize": 1,
        "event.synchronize": 1,
        "item": 1,
        "shape of aten::index.Tensor": 1,
        "stream.synchronize": 1,
        "value of aten::equal": 1,
    }
    lines = [json.loads(file.read_text()) for file in folder.glob("waits.*")]
    by_rank = {line["rank"]: line["waits"] for line in lines}
    assert by_rank.keys() == {"0", "1"}
    assert by_rank["0"] == seen["waits_at_the_end"]
    assert by_rank["1"]["barrier"] == 1
    (trace,) = folder.glob("trace.*")
    lines = trace.read_text().splitlines()
    assert len(lines) == 2  # of streams() and of waits()
    assert all(f"event.synchronize at {PROGRAMS}:" in line for line in lines)


def test_a_missing_operator_is_told_at_once(seen: dict[str, Any]) -> None:
    """What the CPU has no kernel for is rejected with its name."""
    assert "simgpu has no aten::_thnn_fused_lstm_cell" in seen["missing"]


def test_an_error_of_a_task_comes_later_and_stays(seen: dict[str, Any]) -> None:
    """The call itself returns; each later one raises the error."""
    shape, first, second = seen["errors"]
    assert shape == [2]
    assert "asynchronous error of an earlier task" in first
    assert "index out of range" in first
    assert second == first
