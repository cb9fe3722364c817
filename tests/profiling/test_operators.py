"""The table of operators: the same figures whatever the number of steps and ranks."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

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


def event(key: str, *, start: float = 100.0, us: float = 10.0, **others: Any) -> Any:
    """Return an event as torch's profiler has it, in microseconds and bytes."""
    usual = {
        "self_cpu_time_total": 1000.0,
        "cpu_time_total": 3000.0,
        "self_device_time_total": 8000.0,
        "device_time_total": 9000.0,
        "cpu_memory_usage": 2**20,
        "device_memory_usage": 2**22,
        "is_user_annotation": False,
        "device_type": DeviceType.CPU,
    }
    return SimpleNamespace(key=key, time_range=Interval(start, start + us), **(usual | others))


# Two steps of 10 ms. Torch gives the steps of a GPU's trace a second time, as the GPU sees them.
STEPS = [event("ProfilerStep*", start=start, us=1e4, is_user_annotation=True) for start in (0, 3e4)]
ON_GPU = event("ProfilerStep*", start=0, us=9e4, device_type=DeviceType.CUDA)


@pytest.mark.parametrize(
    ("on_gpu", "cost"),
    [(False, Cost(1.0, 3.0, 1.0, 1.0)), (True, Cost(8.0, 9.0, 1.0, 4.0))],
    ids=["CPU", "GPU"],
)
def test_an_operator_costs_so_much_a_step(on_gpu: bool, cost: Cost) -> None:
    """On a GPU the time of its kernels, whose own events would count it twice."""
    kernel = event("sgemm", device_type=DeviceType.CUDA)
    annotation = event("forward", is_user_annotation=True)
    calls = [event("aten::mm", start=start) for start in (500, 3.5e4)]
    own = summarize([*STEPS, ON_GPU, *calls, kernel, annotation], [], on_gpu=on_gpu)
    assert own == Summary(step_ms=10.0, costs={"aten::mm": cost}, peaks=[])


def test_what_starts_between_steps_is_no_part_of_a_step() -> None:
    """An evaluation has the same operators. What a step starts may end after it."""
    inside = [event("aten::mm", start=start, us=2e4) for start in (0, 9999, 3e4)]
    between = [event("aten::mm", start=start) for start in (-5, 1e4, 2.9e4, 4e4)]
    own = summarize([*STEPS, *inside, *between, event("aten::eq", start=2e4)], [], on_gpu=False)
    assert {name: cost.calls for name, cost in own.costs.items()} == {"aten::mm": 1.5}


def test_a_collective_of_gloo_counts_as_a_whole() -> None:
    """Torch gives it no time of its own: it is under way on another thread."""
    gloo = event("gloo:all_reduce", is_user_annotation=True, self_cpu_time_total=0.0)
    assert summarize([*STEPS, gloo], [], on_gpu=False).costs["gloo:all_reduce"].self_ms == 1.5


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
