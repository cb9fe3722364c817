"""The operators that take the most time: each rank's own numbers, and the table over all ranks."""

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.profiling.traces import STEP, Peak

GLOO = "gloo:"  # its collectives are annotations to torch; no other annotation is an operator
MOST_ROWS = 300  # of a rank; what comes after them takes no time
COLUMNS = ("operator", "self_ms", "share", "least_ms", "most_ms", "total_ms", "calls", "mib")
WIDTH = 80


@dataclass(frozen=True)
class Cost:
    """What an operator costs a rank in a step."""

    self_ms: float  # without the operators that it calls; on a GPU, of its own kernels
    total_ms: float  # with them
    calls: float
    mib: float  # allocated and not freed, with the operators that it calls


@dataclass(frozen=True)
class Summary:
    """The traced steps of a rank."""

    step_ms: float
    costs: Mapping[str, Cost]  # by operator
    peaks: Sequence[Peak]


@dataclass(frozen=True)
class Row:
    """An operator's cost in a step; mean over the ranks, but for the rank with the least or most.

    A rank without the operator counts as 0.
    """

    operator: str
    self_ms: float
    share: float  # of the step; threads run side by side, so all shares may add up to more than 1
    least_ms: float
    most_ms: float
    total_ms: float
    calls: float
    mib: float


def summarize(events: Sequence[Any], peaks: Sequence[Peak], *, on_gpu: bool) -> Summary:
    """Return the numbers of a rank from the ``events`` of torch's profiler.

    Only what starts within a step counts, on whichever thread. An evaluation or a checkpoint
    between two steps does not.
    """
    on_cpu = [one for one in events if one.device_type.name == "CPU"]  # kernels are in operators
    spans = sorted(
        (one.time_range.start, one.time_range.end)
        for one in on_cpu
        if one.key.startswith(STEP[:-1])
    )
    starts, calls_of = [start for start, _ in spans], defaultdict[str, list[Any]](list)
    for one in on_cpu:
        start, is_gloo = one.time_range.start, one.key.startswith(GLOO)
        step = bisect_right(starts, start) - 1
        if (is_gloo or not one.is_user_annotation) and step >= 0 and start < spans[step][1]:
            calls_of[one.key].append(one)
    costs = {
        name: _cost(calls, num_steps=len(spans), on_gpu=on_gpu) for name, calls in calls_of.items()
    }
    first = sorted(costs, key=lambda name: -costs[name].self_ms)[:MOST_ROWS]
    return Summary(
        step_ms=sum(end - start for start, end in spans) / 1000 / len(spans),
        costs={name: costs[name] for name in first},
        peaks=peaks,
    )


def _cost(calls: Sequence[Any], *, num_steps: int, on_gpu: bool) -> Cost:
    """Return what all calls of an operator cost in a step, from microseconds and bytes."""
    kind = "device" if on_gpu else "cpu"
    self_time, total_time = f"self_{kind}_time_total", f"{kind}_time_total"
    if calls[0].key.startswith(GLOO):  # it is under way on threads that call nothing else
        self_time = total_time = "cpu_time_total"

    def a_step(attribute: str) -> float:
        return float(sum(getattr(one, attribute) for one in calls)) / num_steps

    return Cost(
        self_ms=a_step(self_time) / 1000,
        total_ms=a_step(total_time) / 1000,
        calls=len(calls) / num_steps,
        mib=a_step(f"{kind}_memory_usage") / 2**20,
    )


def table(ranks: Sequence[Summary]) -> list[Row]:
    """Return a row for each operator, the most expensive first."""
    step_ms = sum(rank.step_ms for rank in ranks) / len(ranks)
    nothing, rows = Cost(0, 0, 0, 0), []
    for name in dict.fromkeys(name for rank in ranks for name in rank.costs):
        costs = [rank.costs.get(name, nothing) for rank in ranks]
        self_ms = [cost.self_ms for cost in costs]
        mean_ms = sum(self_ms) / len(ranks)
        rows.append(
            Row(
                operator=name,
                self_ms=mean_ms,
                share=mean_ms / step_ms,
                least_ms=min(self_ms),
                most_ms=max(self_ms),
                total_ms=sum(cost.total_ms for cost in costs) / len(ranks),
                calls=sum(cost.calls for cost in costs) / len(ranks),
                mib=sum(cost.mib for cost in costs) / len(ranks),
            )
        )
    return sorted(rows, key=lambda row: -row.self_ms)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows, with a line of titles."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, name) for name in COLUMNS] for row in rows)


def lines(rows: Sequence[Row], *, num_rows: int) -> list[str]:
    """Return the first rows as lines of at most 80 characters."""
    found = ["  self ms  share  least ms   most ms   calls  operator"]
    for row in rows[:num_rows]:
        numbers = (
            f"{row.self_ms:9.3f} {row.share:6.1%} {row.least_ms:9.3f} {row.most_ms:9.3f}"
            f" {row.calls:7.1f}"
        )
        name, left = row.operator, WIDTH - len(numbers) - 2
        # The end of a name tells more than its middle: autograd::engine::evaluate_function: X.
        short = name if len(name) <= left else f"...{name[3 - left :]}"
        found.append(f"{numbers}  {short}")
    return found


def peak_line(ranks: Sequence[Summary]) -> str:
    """Return the highest memory of all ranks in a line; empty if nobody allocated any."""
    found = [(peak, rank) for rank, one in enumerate(ranks) for peak in one.peaks]
    if not found:
        return ""
    peak, rank = max(found, key=lambda pair: (pair[0].device != "CPU", pair[0].num_bytes))
    what = " by these steps" if peak.device == "CPU" else ""
    where = f", in {peak.operator}" if peak.operator else ""
    amount = f"{peak.num_bytes / 2**20:.1f} MiB{what}"
    return f"most memory: {amount} (rank {rank}, {peak.device}){where}"[:WIDTH]
