"""Numbers of one run, and their mean and standard deviation over several runs."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp_runner.compare.run import Run
from ddp_runner.metric_names import is_lower_better

SAMPLES_PER_S, STEP_TIME_MS = "perf/samples_per_s", "perf/step_time_ms"
COMM_SHARE, PEAK_MEMORY_GIB = "perf/comm_share", "perf/peak_memory_gib"


@dataclass(frozen=True)
class Stat:
    """A number over several runs."""

    mean: float
    sd: float | None  # sample standard deviation (n - 1); None for a single run
    count: int  # runs that have the number


@dataclass(frozen=True)
class Target:
    """A value of a metric to reach: from below, or from above if lower is better."""

    metric: str
    value: float

    def time_s(self, run: Run) -> float | None:
        """Return when a run first reached it, without its start-up; None if it never did."""
        sign = -1 if is_lower_better(self.metric) else 1
        for line in run.lines:
            value = line.get(self.metric)
            if value is not None and sign * value >= sign * self.value:
                return line["time_s"]
        return None


def stat(values: Iterable[float | None]) -> Stat | None:
    """Return mean and standard deviation of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    sd = statistics.stdev(known) if len(known) > 1 else None
    return Stat(statistics.fmean(known), sd, len(known))


def steady_median(run: Run, metric: str) -> float | None:
    """Return the median of a metric over a run's lines without the first, the warm-up."""
    values = run.values(metric)[1:]
    return statistics.median(values) if values else None


def steady_stat(runs: Sequence[Run], metric: str) -> Stat | None:
    """Return mean and standard deviation of the runs' steady medians."""
    return stat(steady_median(run, metric) for run in runs)


def result_of(run: Run, metric: str) -> float | None:
    """Return a run's result in a metric: the peak memory, a steady median, or the last value."""
    if metric == PEAK_MEMORY_GIB:
        return peak_memory_gib(run)
    return steady_median(run, metric) if metric.startswith("perf/") else run.final.get(metric)


def peak_memory_gib(run: Run) -> float | None:
    """Return the peak memory of rank 0."""
    return max(run.values(PEAK_MEMORY_GIB), default=None)


def step_parts_ms(runs: Sequence[Run]) -> dict[str, float]:
    """Return the mean time of each part of an optimizer step that the runs have measured."""
    parts = {}
    for name in dict.fromkeys(key for run in runs for line in run.lines for key in line):
        is_part = name.startswith("perf/") and name.endswith("_ms") and name != STEP_TIME_MS
        if is_part and (part := steady_stat(runs, name)):
            parts[name.removeprefix("perf/").removesuffix("_ms")] = part.mean
    return parts
