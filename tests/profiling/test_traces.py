"""The traces of several ranks become one, in which nothing of one rank is taken for another's."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddp_runner.profiling.traces import (
    Peak,
    first_ns,
    join_parts,
    message_bytes,
    peaks,
    rank_events,
    write_part,
)

BASE_NS = 1_790_857_026_000_000_000


def trace(*events: dict[str, Any], base_ns: int = BASE_NS) -> dict[str, Any]:
    """Return a trace as torch writes it, of process 77."""
    common = {"ph": "X", "pid": 77, "tid": 78, "dur": 1.0, "args": {}, "cat": "cpu_op"}
    named = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 79, "args": {"name": "thread 79"}},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 0.0},
    ]
    return {
        "baseTimeNanoseconds": base_ns,
        "traceEvents": [*named, *({**common, **event} for event in events)],
    }


STEP = {"name": "ProfilerStep#6", "ts": 1000.5, "dur": 50.0, "cat": "user_annotation"}


def test_two_equal_ranks_share_no_number() -> None:
    """Neither a process, nor a thread, nor a flow, though both have the same ones by themselves."""
    flow = {"name": "fwdbwd", "ph": "s", "id": 5, "ts": 1010.0}
    kernel = {"name": "kernel", "pid": 0, "tid": 7, "ts": 1020.0}
    ranks = [rank_events(trace(STEP, flow, kernel), rank=rank, shift_ns=0) for rank in (0, 1)]
    for key in ("pid", "tid", "id"):
        first, second = ({event[key] for event in events if key in event} for events in ranks)
        assert first
        assert first.isdisjoint(second), key
    sort = {
        event["args"].get("name", event["args"].get("sort_index"))
        for event in ranks[1]
        if event["name"].startswith("process")
    }
    assert sort == {"rank 1", "rank 1, GPU 0", 1000, 1001}


def test_threads_have_names() -> None:
    """The loop's is the one that takes the steps; the profiler's own marks are left out."""
    other = {"name": "aten::mm", "tid": 79, "ts": 1001.0}
    events = rank_events(trace(STEP, other), rank=0, shift_ns=0)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["training loop", "thread 79"]
    assert "Record Window End" not in {event["name"] for event in events}


def test_times_move_from_the_ranks_base_to_the_common_one() -> None:
    """Whatever the base, and to the nanosecond, which a float of 1970 would lose."""
    for base_ns in (BASE_NS, BASE_NS - 7_000_000_123):
        ts = (BASE_NS - base_ns) / 1000 + 1000.501
        own = trace({**STEP, "ts": ts}, base_ns=base_ns)
        assert first_ns(own) == BASE_NS + 1_000_501
        events = rank_events(own, rank=0, shift_ns=500 - first_ns(own))
        assert [event["ts"] for event in events if event["ph"] == "X"] == [0.5]


def test_allocations_become_a_counter_of_each_device() -> None:
    """Torch writes an event for each, which Perfetto would show as a mark without a number."""
    sizes = [
        {"name": "[memory]", "ph": "i", "cat": "memory", "ts": ts, "args": args}
        for ts, args in [
            (1001.0, {"Total Allocated": 2**20, "Device Type": 0, "Device Id": -1}),
            (1002.0, {"Total Allocated": 3 * 2**20, "Device Type": 0, "Device Id": -1}),
            (1003.0, {"Total Allocated": 2**21, "Device Type": 1, "Device Id": 0}),
        ]
    ]
    calls = [
        {"name": "aten::mm", "ts": 1001.5, "dur": 1.0},
        {"name": "aten::empty", "ts": 1001.9, "dur": 0.2},
        {"name": "autograd::engine::evaluate_function: X", "ts": 1001.0, "dur": 9.0},
    ]
    own = trace(STEP, *calls, *sizes)
    events = [event for event in rank_events(own, rank=0, shift_ns=0) if event["ph"] == "C"]
    assert [(event["name"], event["args"]["MiB"]) for event in events] == [
        ("CPU memory", 1.0),
        ("CPU memory", 3.0),
        ("GPU 0 memory", 2.0),
    ]
    assert peaks(own) == [Peak("CPU", 3 * 2**20, "aten::mm"), Peak("GPU 0", 2**21, "")]


@pytest.mark.parametrize(
    ("name", "args", "num_bytes"),
    [
        ("gloo:all_reduce", {"Input Dims": [[10, 3]], "Input type": ["float"]}, 120),
        ("gloo:all_reduce", {"Input Dims": [[5], [6]], "Input type": ["double", "double"]}, 88),
        ("gloo:all_reduce", {"Input Dims": [[]], "Input type": ["long int"]}, 8),
        ("gloo:all_reduce", {"Input Dims": [[4]], "Input type": ["c10::BFloat16"]}, 8),
        ("gloo:barrier", {}, None),
        ("aten::mm", {"Input Dims": [[10, 3]], "Input type": ["float"]}, None),
        ("record_param_comms", {"In msg nelems": 100, "dtype": "BFloat16"}, 200),
        ("ncclDevKernel_AllReduce", {"In msg nelems": 100, "dtype": "Float"}, 400),
        ("ncclDevKernel_AllReduce", {"In msg nelems": 100, "dtype": "Float8_e4m3fn"}, None),
    ],
)
def test_a_collective_has_its_bytes(name: str, args: dict[str, Any], num_bytes: int | None) -> None:
    """Those that a rank gives to it; a type that nobody has measured has none."""
    assert message_bytes({"name": name, "args": args}) == num_bytes


def test_collectives_that_overlap_are_side_by_side() -> None:
    """Perfetto drops an event that overlaps another one on its thread without being inside it."""
    times = [(1000.0, 10.0), (1005.0, 10.0), (1010.0, 3.0), (1020.0, 1.0)]
    gloo = [{"name": "gloo:all_reduce", "ts": ts, "dur": dur} for ts, dur in times]
    events = rank_events(trace(STEP, *gloo), rank=0, shift_ns=-BASE_NS)
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    placed = [threads[one["tid"]] for one in events if one["name"] == "gloo:all_reduce"]
    assert placed == ["gloo 1", "gloo 2", "gloo 1", "gloo 1"]


def test_parts_join_to_one_trace(tmp_path: Path) -> None:
    """As gzip and JSON both read it."""
    parts = [tmp_path / f"part-{rank}" for rank in range(3)]
    for rank, part in enumerate(parts):
        write_part(part, [{"name": "a", "pid": rank}, {"name": "b"}], is_first=rank == 0)
    join_parts(parts, tmp_path / "trace.json.gz")
    merged = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert [event.get("pid") for event in merged["traceEvents"]] == [0, None, 1, None, 2, None]
