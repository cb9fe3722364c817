"""The table of operators: the same figures whatever the number of steps and ranks."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from ddp_runner.profiling.operators import (
    COLUMNS,
    Cost,
    Summary,
    lines,
    peak_line,
    summarize,
    table,
    write_csv,
)
from ddp_runner.profiling.traces import Peak


def average(key: str, **numbers: Any) -> Any:
    """Return an operator of two steps as torch's profiler sums it up, in microseconds and bytes."""
    usual = {
        "count": 4,
        "self_cpu_time_total": 1000.0,
        "cpu_time_total": 3000.0,
        "self_device_time_total": 8000.0,
        "device_time_total": 9000.0,
        "cpu_memory_usage": 2**20,
        "device_memory_usage": 2**22,
        "is_user_annotation": False,
        "device_type": DeviceType.CPU,
    }
    return SimpleNamespace(key=key, **(usual | numbers))


STEPS = average("ProfilerStep*", count=2, cpu_time_total=20_000.0, is_user_annotation=True)


@pytest.mark.parametrize(
    ("on_gpu", "cost"),
    [(False, Cost(0.5, 1.5, 2.0, 0.5)), (True, Cost(4.0, 4.5, 2.0, 2.0))],
    ids=["CPU", "GPU"],
)
def test_an_operator_costs_so_much_a_step(on_gpu: bool, cost: Cost) -> None:
    """On a GPU the time of its kernels, whose own rows would count it twice."""
    kernel = average("sgemm", device_type=DeviceType.CUDA)
    annotation = average("forward", is_user_annotation=True)
    own = summarize([STEPS, average("aten::mm"), kernel, annotation], [], on_gpu=on_gpu)
    assert own == Summary(step_ms=10.0, costs={"aten::mm": cost}, peaks=[])


def test_a_collective_of_gloo_counts_as_a_whole() -> None:
    """Torch gives it no time of its own: it is under way on another thread."""
    gloo = average("gloo:all_reduce", is_user_annotation=True, self_cpu_time_total=0.0)
    assert summarize([STEPS, gloo], [], on_gpu=False).costs["gloo:all_reduce"].self_ms == 1.5


def test_the_table_is_over_all_ranks(tmp_path: Path) -> None:
    """A mean, the least and the most; a rank that never ran an operator spent nothing on it."""
    costs = {"aten::mm": Cost(2.0, 3.0, 4.0, 1.0), "aten::add": Cost(0.5, 0.5, 1.0, 0.0)}
    ranks = [Summary(10.0, costs, []), Summary(30.0, {"aten::mm": Cost(6.0, 7.0, 4.0, 3.0)}, [])]
    rows = table(ranks)
    assert [row.operator for row in rows] == ["aten::mm", "aten::add"]
    write_csv(tmp_path / "operators.csv", rows)
    header, first, second = csv.reader((tmp_path / "operators.csv").open())
    assert header == list(COLUMNS)
    assert [float(one) for one in first[1:]] == [4.0, 0.2, 2.0, 6.0, 5.0, 4.0, 2.0]
    assert [float(one) for one in second[1:]] == [0.25, 0.0125, 0.0, 0.5, 0.25, 0.5, 0.0]


def test_lines_fit_a_terminal_and_keep_the_end_of_a_name() -> None:
    """The begin of a long name is the same for many operators."""
    name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    (_, line) = lines(table([Summary(1e4, {name: Cost(9999.0, 1, 1, 1)}, [])]), num_rows=5)
    assert len(line) == 80
    assert line.endswith("...torch::autograd::AccumulateGrad")


def test_the_peak_is_that_of_the_fullest_rank() -> None:
    """Of the GPUs, if there are any."""
    cpu, gpu = Peak("CPU", 2**25, "aten::mm"), Peak("GPU 1", 2**24, "")
    assert peak_line([Summary(1, {}, [])]) == ""
    assert peak_line([Summary(1, {}, []), Summary(1, {}, [cpu])]) == (
        "most memory: 32.0 MiB by these steps (rank 1, CPU), in aten::mm"
    )
    assert peak_line([Summary(1, {}, [cpu, gpu])]) == "most memory: 16.0 MiB (rank 0, GPU 1)"
