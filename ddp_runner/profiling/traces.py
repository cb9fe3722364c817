"""Merges the Chrome traces that torch's profiler writes on each rank. Torch-free.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from typing import Any, TypeVar

STEP = "ProfilerStep#"  # tools that read torch's traces, such as HTA, know steps by this name
MEMORY = "[memory]"  # torch's name of an event for each allocation
AUTOGRAD = "autograd::engine::"  # its events surround the operators of backward
FLOWS = "stfbne"  # phases of events whose `id` belongs to one rank
IDS_PER_RANK = 2**32
# Bytes by the names that torch and NCCL give a type, in lower case and without c10::.
TYPE_BYTES = {
    **dict.fromkeys(("double", "long", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short int"), 2),
    **dict.fromkeys(("bool", "byte", "char", "signed char", "unsigned char"), 1),
}

Event = dict[str, Any]
T = TypeVar("T")
Thread = tuple[int, Any]  # process and thread, as the rank's own trace names them


@dataclass(frozen=True)
class Peak:
    """The most memory that was allocated on a device while steps were traced."""

    device: str
    num_bytes: int
    operator: str  # the outermost one that ran at the peak; empty if none did


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace as torch wrote it."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def first_ns(trace: Mapping[str, Any]) -> int:
    """Return when the trace begins, in nanoseconds of its rank's clock since 1970."""
    return min(_time_ns(trace, event) for event in _events(trace) if event["ph"] == "X")


def rank_events(trace: Mapping[str, Any], *, rank: int, shift_ns: int) -> list[Event]:
    """Return the events of a rank's trace as the merged trace has them.

    Each device of the rank is a process, such as "rank 1" and "rank 1, GPU 0". Processes, threads
    and flows get numbers that no other rank has. Memory becomes a counter. A collective gets its
    `bytes`.

    Args:
        trace: as torch wrote it.
        rank: whose trace it is.
        shift_ns: nanoseconds to add to its times, so that the merged trace begins near 0.
    """
    named = list(_events(trace))
    events = _apart([event for event in named if event["ph"] != "M"])
    loop = next(
        _thread(event)
        for event in events
        if event["name"].startswith(STEP) and event["cat"] == "user_annotation"  # not on a GPU
    )
    pids = _numbers((event["pid"] for event in events), first=1000 * rank + 1)
    tids = _numbers(map(_thread, events), first=10_000_000 * (rank + 1))
    tids[loop] = pids[loop[0]]  # to Perfetto, the main thread: it is shown first
    merged = list(_names(named, pids, tids, loop=loop, rank=rank))
    for event in events:
        new = event | {
            "ts": (_time_ns(trace, event) + shift_ns) / 1000,
            "pid": pids[event["pid"]],
            "tid": tids[_thread(event)],
        }
        if event["ph"] in FLOWS and isinstance(event.get("id"), int):
            new["id"] = rank * IDS_PER_RANK + event["id"]
        num_bytes = message_bytes(event)
        if num_bytes is not None:
            new["args"] = {**event["args"], "bytes": num_bytes}
        if event["name"] == MEMORY:
            mib = event["args"]["Total Allocated"] / 2**20
            name = f"{_device(event['args'])} memory"  # Perfetto adds the unit
            new = {"ph": "C", "name": name, "args": {"MiB": mib}} | {
                key: new[key] for key in ("ts", "pid", "tid")
            }
        merged.append(new)
    return merged


def message_bytes(event: Event) -> int | None:
    """Return how many bytes a collective takes from its rank; None for any other event.

    NCCL's events have the number of elements. Those of gloo have shapes, if shapes are recorded.
    """
    args = event.get("args", {})
    if "In msg nelems" in args:
        kind, num_elements = args.get("dtype"), int(args["In msg nelems"])
    elif event["name"].startswith("gloo:") and args.get("Input Dims"):
        kind = args["Input type"][0]
        num_elements = sum(math.prod(shape) for shape in args["Input Dims"])
    else:
        return None
    size = TYPE_BYTES.get(str(kind).lower().removeprefix("c10::"))
    return None if size is None else size * num_elements


def peaks(trace: Mapping[str, Any]) -> list[Peak]:
    """Return the peak memory of each device that the trace has allocations on."""
    highest = dict[str, Event]()
    operators = [event for event in _events(trace) if event.get("cat") == "cpu_op"]
    for event in _events(trace):
        if event["name"] == MEMORY:
            device = _device(event["args"])
            known = highest.setdefault(device, event)
            if event["args"]["Total Allocated"] > known["args"]["Total Allocated"]:
                highest[device] = event
    return [
        Peak(device, event["args"]["Total Allocated"], _outermost(operators, around=event))
        for device, event in sorted(highest.items())
    ]


def write_part(path: Path, events: Sequence[Event], *, is_first: bool) -> None:
    """Write a rank's events as its part of a merged trace, for ``join_parts``."""
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    text = ",\n".join(lines if is_first else ["", *lines])
    path.write_bytes(gzip.compress(text.encode(), 6))


def join_parts(parts: Sequence[Path], path: Path) -> None:
    """Join the ranks' parts, in the order of the ranks, to one trace.

    A gzip file may have many members, so each rank compresses its own part and nobody unpacks it.
    """
    with path.open("wb") as file:
        file.write(gzip.compress(b'{"displayTimeUnit":"ms","traceEvents":[\n'))
        for part in parts:
            with part.open("rb") as content:
                copyfileobj(content, file)
        file.write(gzip.compress(b"\n]}\n"))


def _events(trace: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of processes, without the profiler's own marks."""
    for event in trace["traceEvents"]:
        if isinstance(event.get("pid"), int):
            yield event


def _time_ns(trace: Mapping[str, Any], event: Event) -> int:
    """Return an event's time since 1970; the trace has microseconds since a base of its own."""
    since_base_us: float = event["ts"]
    return int(trace.get("baseTimeNanoseconds", 0)) + round(1000 * since_base_us)


def _thread(event: Event) -> Thread:
    return event["pid"], event.get("tid")


def _numbers(found: Iterable[T], *, first: int) -> dict[T, int]:
    return {one: first + index for index, one in enumerate(dict.fromkeys(found))}


def _apart(events: Sequence[Event]) -> list[Event]:
    """Return the events with gloo's collectives on threads of their own.

    Several are under way at a time, and a thread in a trace shows only what is nested.
    """
    ends = list[float]()  # of the last collective on each of these threads
    moved = dict[int, str]()
    gloo = [event for event in events if event["ph"] == "X" and event["name"].startswith("gloo:")]
    for event in sorted(gloo, key=lambda event: event["ts"]):
        free = [lane for lane, end in enumerate(ends) if end <= event["ts"]]
        lane = free[0] if free else len(ends)
        ends[lane:] = [event["ts"] + event["dur"], *ends[lane + 1 :]]
        moved[id(event)] = f"gloo {lane + 1}"
    return [event | {"tid": moved.get(id(event), event.get("tid"))} for event in events]


def _names(
    named: Sequence[Event],
    pids: Mapping[int, int],
    tids: Mapping[Thread, int],
    *,
    loop: Thread,
    rank: int,
) -> Iterator[Event]:
    """Yield the names of a rank's processes and threads, and their order."""
    labels = {
        event["pid"]: event["args"]["labels"]
        for event in named
        if event["name"] == "process_labels"
    }
    threads = {
        _thread(event): event["args"]["name"] for event in named if event["name"] == "thread_name"
    }
    by_label = sorted(pids, key=lambda pid: labels.get(pid, "CPU"))  # the CPU, then the GPUs
    for place, old in enumerate(by_label):
        label, number = labels.get(old, "CPU"), {"ph": "M", "pid": pids[old]}
        name = f"rank {rank}" if label == "CPU" else f"rank {rank}, {label}"
        yield number | {"name": "process_name", "args": {"name": name}}
        yield number | {"name": "process_sort_index", "args": {"sort_index": 1000 * rank + place}}
    for old_thread, tid in tids.items():
        number = {"ph": "M", "pid": pids[old_thread[0]], "tid": tid}
        name = str(threads.get(old_thread, old_thread[1]))
        name = "training loop" if old_thread == loop else name
        yield number | {"name": "thread_name", "args": {"name": name}}
        yield number | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _device(args: Mapping[str, Any]) -> str:
    return "CPU" if args["Device Type"] == 0 else f"GPU {args['Device Id']}"


def _outermost(operators: Sequence[Event], *, around: Event) -> str:
    """Return the name of the longest of these operators that surrounds an event."""
    surrounding = [
        one
        for one in operators
        if _thread(one) == _thread(around)
        and one["ts"] <= around["ts"] <= one["ts"] + one["dur"]
        and not one["name"].startswith(AUTOGRAD)
    ]
    return str(max(surrounding, key=lambda one: one["dur"])["name"]) if surrounding else ""
