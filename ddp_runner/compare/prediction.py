"""What a step should take at more ranks: the fewest ranks' computing and a measured all-reduce.

A prediction takes the step of the baseline apart. What it computes grows with the samples of a
rank, the optimizer and the rest stay, and DDP adds the all-reduce of its gradients, bucket by
bucket, none of it hidden behind the backward. How long an all-reduce of so many bytes takes, the
collectives benchmark (``task=collectives``) has measured for the same backend and world size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.compare.run import Run

if TYPE_CHECKING:
    from ddp_runner.compare.rows import Row

PER_SAMPLE, FIXED = ("data", "forward", "backward"), ("optimizer", "rest")


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


def predict(row: "Row", base: "Row", links: Mapping[tuple[str, int], Link]) -> Prediction | None:
    """Return what the base's step and a link say of a row; None where something was not measured.

    Only a mode that all-reduces its gradients in buckets, as DDP does, can be predicted.
    """
    run, first = row.runs[0], base.runs[0]
    num_bytes = run.record.get("gradient_bytes")
    cap_mb = run.config.get("parallelism.bucket_cap_mb")
    link = links.get((str(run.config.get("backend.name")), row.world_size))
    own, basic = _parts(row), _parts(base)
    if not (own and basic and link and num_bytes and cap_mb and base.samples_per_s):
        return None
    samples, of_base = (int(one.config["batch.global_size"]) for one in (run, first))
    growth = (samples / row.world_size) / (of_base / base.world_size)
    parts = {part: basic[part] * growth for part in PER_SAMPLE}
    parts |= {part: basic[part] for part in FIXED}
    parts |= {"comm": link.time_ms(num_bytes, num_buckets(num_bytes, cap_mb)), "wait": 0.0}
    samples_per_s = 1000 * samples / sum(parts.values())
    return Prediction(samples_per_s, samples_per_s / base.samples_per_s.mean, parts, own)


def num_buckets(num_bytes: int, cap_mb: float) -> int:
    """Return in how many messages DDP sends gradients of so many bytes.

    Its first bucket is no smaller than the others: that is so only where no cap is given.
    """
    return max(1, math.ceil(num_bytes / (cap_mb * 2**20)))


def _parts(row: "Row") -> dict[str, float] | None:
    """Return all parts of a row's step, which add up to it; None: they were not measured."""
    measured = row.step_parts_ms
    if row.step_time_ms is None or not {*PER_SAMPLE, "optimizer"}.issubset(measured):
        return None
    parts = {part: measured.get(part, 0.0) for part in (*PER_SAMPLE, "optimizer", "comm", "wait")}
    return {**parts, "rest": row.step_time_ms.mean - sum(parts.values())}


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
