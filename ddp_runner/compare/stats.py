"""One run's figures out of its lines of metrics, and their mean and spread over several runs."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ddp_runner.compare.run import Run
from ddp_runner.metric_names import is_lower_better

PACE, STEP_TIME, COMM_SHARE = "perf/samples_per_s", "perf/step_time_ms", "perf/comm_share"
PEAK_MEMORY = "perf/peak_memory_gib"


@dataclass(frozen=True)
class Stat:
    """A figure over several runs."""

    mean: float
    sd: float | None  # of the sample (n - 1); None: only one run has the figure
    count: int  # runs that have it


@dataclass(frozen=True)
class Target:
    """A value of a metric that is to be reached: from below, or from above as by a loss."""

    metric: str
    value: float

    def time_s(self, run: Run) -> float | None:
        """Return when a run first reached it, without its start-up; None: it never did."""
        sign = -1 if is_lower_better(self.metric) else 1
        for line in run.lines:
            value = line.get(self.metric)
            if value is not None and sign * value >= sign * self.value:
                return line["time_s"]
        return None


def stat(values: Iterable[float | None]) -> Stat | None:
    """Return mean and standard deviation of the values that are there; None: none is."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    sd = statistics.stdev(found) if len(found) > 1 else None
    return Stat(statistics.fmean(found), sd, len(found))


def steady(run: Run, metric: str) -> float | None:
    """Return the median of a metric's lines without the first, which holds the warm-up."""
    values = run.values(metric)[1:]
    return statistics.median(values) if values else None


def outcome(run: Run, metric: str) -> float | None:
    """Return what a run came to by a metric: its last value; of what it costs the steady one."""
    if metric == PEAK_MEMORY:
        return peak_memory_gib(run)
    return steady(run, metric) if metric.startswith("perf/") else run.final.get(metric)


def peak_memory_gib(run: Run) -> float | None:
    """Return the most memory that rank 0 has held."""
    return max(run.values(PEAK_MEMORY), default=None)


def step_parts_ms(runs: Iterable[Run]) -> dict[str, float]:
    """Return what an optimizer step's time goes into, where the runs have measured it."""
    runs = list(runs)
    names = dict.fromkeys(key for run in runs for line in run.lines for key in line)
    parts = {
        name: stat(steady(run, name) for run in runs)
        for name in names
        if name.startswith("perf/") and name.endswith("_ms") and name != STEP_TIME
    }
    return {
        name.removeprefix("perf/").removesuffix("_ms"): found.mean
        for name, found in parts.items()
        if found is not None
    }
