"""Read the merged trace of a profile."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

Event = dict[str, Any]


def merged_events(folder: Path) -> list[Event]:
    """Return the events of the merged trace in a profile's folder."""
    events: list[Event] = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))[
        "traceEvents"
    ]
    return events


def processes(events: list[Event]) -> dict[int, str]:
    """Return the names of a trace's processes by their numbers."""
    return {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}


def spans(events: list[Event], name: str) -> dict[str, list[tuple[float, float]]]:
    """Return begin and end in microseconds of each event of a name, by process, in their order."""
    names, found = processes(events), defaultdict(list)
    for one in events:
        if one["ph"] == "X" and one["name"].startswith(name):
            found[names[one["pid"]]].append((one["ts"], one["ts"] + one["dur"]))
    return {process: sorted(times) for process, times in found.items()}


def apart_ms(events: list[Event]) -> float:
    """Return how far the clocks of two ranks are apart, by where the same all-reduces end.

    No rank has the sum before each has sent its part, so the true ends differ by the last message.
    On a busy machine now one rank is woken late and now the other, so it is the median, with signs.
    """
    ends = spans(events, "gloo:all_reduce")
    first, second = (sorted(end for _, end in ends[f"rank {rank}"]) for rank in (0, 1))
    assert len(first) == len(second) >= 5
    return abs(median(one - other for one, other in zip(first, second, strict=True))) / 1000
