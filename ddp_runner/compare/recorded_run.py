"""A run folder as data: run.json, the config, the metrics, and values computed from them."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeGuard

from ddp_runner.compare.settings import Setting
from ddp_runner.config.identity import affects_results, is_inside, only_used
from ddp_runner.metric_names import best_end

# No measurement is larger, and sums and squares of smaller numbers stay finite.
MAX_NUMBER = 1e150


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run folder."""

    folder: Path  # the path that the user gave, or a folder below it
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json
    config: Mapping[str, Any] = field(default_factory=dict)  # dotted keys and values
    lines: tuple[Mapping[str, float | None], ...] = ()  # metrics.jsonl; None: not finite
    reason: str | None = None  # why it cannot be compared; None if it can
    ran_out: str | None = None  # how it ran out of memory or time; its row has no results
    notes: tuple[str, ...] = ()  # remarks for the reader

    @cached_property
    def setting(self) -> Setting:
        """The keys and values that repetitions of a run share."""
        used = only_used(self.config, uses=self.record.get("uses"))
        return {key: used[key] for key in filter(_is_of_setting, used)} | {
            "world_size": self.world_size,
            "num_devices": self.num_devices,
            "parallel_jobs": self.is_parallel_job,  # other jobs slow it down
        }

    @property
    def task(self) -> str:
        """The task for the comparison: a loop of the user's own counts as a training."""
        task = self.record.get("task")
        return task if task in ("evaluate", "plan", "collectives") else "train"

    @property
    def comm_hook(self) -> str | None:
        """DDP's communication hook: bf16, fp16 or the _target_ of the user's hook."""
        key = "parallelism.comm_hook"
        hook = self.config.get(key, self.config.get(f"{key}._target_"))
        return None if hook is None else str(hook)

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return int(self.record["world_size"])

    @property
    def num_devices(self) -> int:
        """Number of devices on all machines; on the CPU, number of ranks."""
        return int(self.record["num_devices"])

    @property
    def sessions(self) -> list[Mapping[str, Any]]:
        """An entry for the start and for each resume."""
        sessions = self.record.get("sessions")
        listed = sessions if isinstance(sessions, list) else []
        return [session for session in listed if isinstance(session, dict)]

    @property
    def busy_share(self) -> float | None:
        """Share of the cores' time on rank 0's machine that other work used; None if unknown."""
        if self.task == "plan":  # it computes its times
            return None
        names = ("busy_share_others", "steal_share")
        shares = [nested(self.record, "load", "end", name) for name in names]
        measured = [share for share in shares if is_finite(share)]
        return sum(measured) if measured else None

    @property
    def directions(self) -> dict[str, str]:
        """Whether the highest (max) or lowest (min) value of the user's own metrics is best."""
        directions = self.record.get("directions")
        items = directions.items() if isinstance(directions, dict) else ()
        return {name: end for name, end in items if end in ("max", "min")}

    @property
    def tags(self) -> list[str]:
        """Tags from the user."""
        tags = self.record.get("tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def seed(self) -> Any:
        """Seed of the weights, the order of the samples and their augmentation."""
        return self.config.get("seed")

    @property
    def is_parallel_job(self) -> bool:
        """Whether other jobs of its sweep ran on the same machine at the same time."""
        return self.record.get("parallel_jobs") is True

    @cached_property
    def final(self) -> dict[str, float]:
        """The finite metrics of run.json; see ``RunFields``."""
        metrics = self.record.get("metrics")
        items = metrics.items() if isinstance(metrics, dict) else ()
        return {key: float(value) for key, value in items if is_finite(value)}

    def number(self, name: str) -> float | None:
        """Return a field of run.json; None if it is not a finite number."""
        value = self.record.get(name)
        return float(value) if is_finite(value) else None

    def positive(self, key: str) -> float | None:
        """Return a key of the config; None if it is not a positive number."""
        value = self.config.get(key)
        return value if is_finite(value) and value > 0 else None

    def values(self, metric: str) -> list[float]:
        """Return the finite values of a metric in the order of the steps."""
        return [value for line in self.lines if (value := line.get(metric)) is not None]

    def result(self, metric: str) -> float | None:
        """Return the run's result in a metric; None if it is missing.

        The highest value for the peak memory; the median without the first line, the warm-up, for
        other metrics of `perf/`; else the last value.
        """
        if metric == "perf/peak_memory_gib":
            return max(self.values(metric), default=None)
        if metric.startswith("perf/"):
            values = self.values(metric)[1:]
            return statistics.median(values) if values else None
        return self.final.get(metric)


@cache  # thousands of runs have the same keys
def _is_of_setting(key: str) -> bool:
    """Return whether runs that differ in this key have different settings."""
    # A row averages over seeds, and a metric changes neither the work nor its speed.
    return affects_results(key) and not is_inside(key, ("seed", "name", "metrics"))


@dataclass(frozen=True)
class Target:
    """A value of a metric to reach."""

    metric: str
    value: float

    def time_s(self, run: RecordedRun) -> float | None:
        """Return when a run first reached the value, without its start-up; None if it never did."""
        sign = -1 if best_end(self.metric, run.directions) == "min" else 1
        for line in run.lines:
            value = line.get(self.metric)
            if value is not None and sign * value >= sign * self.value:
                return line["time_s"]
        return None


@dataclass(frozen=True)
class Stat:
    """A number over several runs."""

    mean: float
    sd: float | None  # sample standard deviation (n - 1); None for a single run or a single seed
    count: int  # number of runs with a value


def stat(values: Iterable[float | None]) -> Stat | None:
    """Return mean and standard deviation of the values that are not None; None if all are."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    count, is_equal = len(present), min(present) == max(present)
    mean = present[0] if is_equal else statistics.fmean(present)  # which is rounded
    squares = math.fsum((value - mean) ** 2 for value in present)  # statistics.stdev is slow
    return Stat(mean, math.sqrt(squares / (count - 1)) if count > 1 else None, count)


def best_step(record: Mapping[str, Any]) -> int | None:
    """Return the step of a run.json's metrics; None if it is the last step."""
    step = record.get("exported_step")
    return step if isinstance(step, int) and step != record.get("step") else None


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that a comparison can compute with."""
    return isinstance(value, int | float) and abs(value) <= MAX_NUMBER


def nested(value: Any, *keys: str) -> Any:
    """Return the value below nested keys of mappings; None if it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
