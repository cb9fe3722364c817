"""What a step should take at more ranks: the fewest ranks' computing and a measured all-reduce.

A prediction takes the step of the baseline apart. What it computes grows with the samples of a
rank, the optimizer and the rest stay, and DDP adds the all-reduce of its gradients, bucket by
bucket, none of it hidden behind the backward. How long an all-reduce of so many bytes takes, the
collectives benchmark (``task=collectives``) has measured for the same backend and world size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.compare.run import Run
from ddp_runner.metric_names import StepPart

PER_SAMPLE = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD)
REST = "rest"  # of a step's time: what no part accounts for


@dataclass(frozen=True)
class Link:
    """A backend between so many ranks: an all-reduce of S bytes takes latency + S / bandwidth."""

    backend: str
    world_size: int
    latency_us: float
    gb_per_s: float  # 1e9 bytes of the message a second: nccl-tests' algbw
    num_sizes: int  # messages that it is fitted to
    error: float  # of the fit: the median over those, as a part of the time

    def time_ms(self, num_bytes: int, num_messages: int) -> float:
        """Return how long an all-reduce in so many messages takes."""
        return num_messages * self.latency_us / 1e3 + num_bytes / self.gb_per_s / 1e6


@dataclass(frozen=True)
class Prediction:
    """A row's step as it should be, and what it is."""

    samples_per_s: float
    speedup: float  # over the baseline
    parts_ms: Mapping[str, float]  # predicted
    measured_ms: Mapping[str, float]  # the same parts


def links_of(runs: Sequence[Run]) -> dict[tuple[str, int], Link]:
    """Return the links that ``task=collectives`` runs have measured, by backend and world size."""
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for run in runs:
        place = (str(run.config.get("backend.name")), run.world_size)
        for one in run.record.get("collectives", ()):
            if (one.get("op"), one.get("reduce_op"), one.get("dtype")) == (
                *("all_reduce", "sum"),
                "float32",
            ):
                points.setdefault(place, []).append((one["bytes"], one["latency_us"]["median"]))
    found = {place: _fit(place, measured) for place, measured in points.items()}
    return {place: link for place, link in found.items() if link is not None}


@dataclass(frozen=True)
class Measured:
    """The mean step of one setting's runs, of which the first stands for what they share."""

    run: Run
    samples_per_s: float
    step_time_ms: float
    parts_ms: Mapping[str, float]  # as far as they were measured


def predict(
    row: Measured, base: Measured, links: Mapping[tuple[str, int], Link]
) -> Prediction | None:
    """Return what the base's step and a link say of a row; None where something was not measured.

    Only a mode that all-reduces its gradients in buckets, as DDP does, can be predicted.
    """
    run, first = row.run, base.run
    num_bytes = run.record.get("gradient_bytes")
    cap_mb = run.config.get("parallelism.bucket_cap_mb")
    link = links.get((str(run.config.get("backend.name")), run.world_size))
    own, basic = _parts(row), _parts(base)
    if not (own and basic and link and num_bytes and cap_mb):
        return None
    samples, of_base = (int(one.config["batch.global_size"]) for one in (run, first))
    growth = (samples / run.world_size) / (of_base / first.world_size)
    parts: dict[str, float] = {part: basic[part] * growth for part in PER_SAMPLE}
    parts |= {part: basic[part] for part in (StepPart.OPTIMIZER, REST)}
    exchange_ms = link.time_ms(num_bytes, num_buckets(num_bytes, cap_mb))
    parts |= {StepPart.COMM: exchange_ms, StepPart.WAIT: 0.0}
    samples_per_s = 1000 * samples / sum(parts.values())
    return Prediction(samples_per_s, samples_per_s / base.samples_per_s, parts, own)


def num_buckets(num_bytes: int, cap_mb: float) -> int:
    """Return in how many messages DDP sends gradients of so many bytes.

    Its first bucket is no smaller than the others: that is so only where no cap is given.
    """
    return max(1, math.ceil(num_bytes / (cap_mb * 2**20)))


def _parts(row: Measured) -> dict[str, float] | None:
    """Return all parts of a step, which add up to it; None: they were not measured."""
    needed = (*PER_SAMPLE, StepPart.OPTIMIZER)
    if not set(needed).issubset(row.parts_ms):
        return None
    names = (*needed, StepPart.COMM, StepPart.WAIT)
    parts: dict[str, float] = {part: row.parts_ms.get(part, 0.0) for part in names}
    return {**parts, REST: row.step_time_ms - sum(parts.values())}


def _fit(place: tuple[str, int], points: Sequence[tuple[int, float]]) -> Link | None:
    """Fit time = latency + bytes / bandwidth, each size weighing the same by its relative error."""
    import numpy as np  # a tenth of a second that most comparisons need not spend

    sizes, times_us = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    if len(set(sizes)) < 2:
        return None
    slope, intercept = np.polyfit(sizes, times_us, 1, w=1 / times_us)
    if slope <= 0:
        return None  # larger messages were not slower: nothing but noise was measured
    latency_us = max(0.0, float(intercept))
    errors = abs(latency_us + slope * sizes - times_us) / times_us
    return Link(
        *place,
        latency_us=latency_us,
        gb_per_s=float(1 / (slope * 1e3)),
        num_sizes=len(set(sizes)),
        error=float(np.median(errors)),
    )
