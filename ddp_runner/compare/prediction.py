"""Predicted step times: the computing of the baseline plus a measured all-reduce.

The time for computing grows with the samples per rank, the optimizer and the rest stay the same,
and DDP adds the all-reduce of its gradients, bucket by bucket, with no overlap with the backward.
``task=collectives`` has measured the all-reduce with the same backend and world size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.compare.rows import ComparisonRow, Prediction
from ddp_runner.compare.run import Run
from ddp_runner.metric_names import StepPart

PER_SAMPLE = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD)
COMPUTED = (*PER_SAMPLE, StepPart.OPTIMIZER)
REST = "rest"  # the time of a step outside of its measured parts


@dataclass(frozen=True)
class AllReduceFit:
    """The time of an all-reduce of S bytes as latency + S / bandwidth."""

    backend: str
    world_size: int
    latency_us: float
    gb_per_s: float  # 1e9 bytes of the message per second, the algbw of nccl-tests
    num_sizes: int  # message sizes in the fit
    error: float  # median relative error of the fit


AllReduceFits = Mapping[tuple[str, int], AllReduceFit]  # by backend and world size


def fit_all_reduces(runs: Sequence[Run]) -> AllReduceFits:
    """Return what ``task=collectives`` runs have measured."""
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for run in runs:
        for call in run.record.get("collectives", ()):
            kind = (call.get("op"), call.get("reduce_op"), call.get("dtype"))
            if kind == ("all_reduce", "sum", "float32"):
                point = call["bytes"], call["latency_us"]["median"]
                points.setdefault(_backend_and_size(run), []).append(point)
    fits = {key: _fit(*key, measured) for key, measured in points.items()}
    return {key: fit for key, fit in fits.items() if fit is not None}


def predict(row: ComparisonRow, base: ComparisonRow, fits: AllReduceFits) -> Prediction | None:
    """Predict the step of a row from its baseline's; None if a measurement is missing.

    Only modes that all-reduce their gradients in buckets, as DDP does, have a prediction, and only
    on more ranks than the baseline.
    """
    run, base_run = row.runs[0], base.runs[0]  # any run of the setting
    num_bytes = run.record.get("gradient_bytes")
    cap_mb = run.config.get("parallelism.bucket_cap_mb")
    fit = fits.get(_backend_and_size(run))
    measured_ms, base_ms = _all_parts_ms(row), _all_parts_ms(base)
    if base.world_size >= row.world_size or not (num_bytes and cap_mb and fit):
        return None
    if measured_ms is None or base_ms is None or base.samples_per_s is None:
        return None
    samples = int(run.config["batch.global_size"])
    base_samples = int(base_run.config["batch.global_size"])
    growth = (samples / run.world_size) / (base_samples / base_run.world_size)
    latency_ms = num_buckets(num_bytes, cap_mb) * fit.latency_us / 1e3
    parts_ms: dict[str, float] = {part: base_ms[part] * growth for part in PER_SAMPLE}
    parts_ms |= {part: base_ms[part] for part in (StepPart.OPTIMIZER, REST)}
    parts_ms |= {StepPart.COMM: latency_ms + num_bytes / fit.gb_per_s / 1e6, StepPart.WAIT: 0.0}
    samples_per_s = 1000 * samples / sum(parts_ms.values())
    return Prediction(samples_per_s, samples_per_s / base.samples_per_s.mean, parts_ms, measured_ms)


def num_buckets(num_bytes: int, cap_mb: float) -> int:
    """Return the number of messages in which DDP sends gradients of so many bytes.

    DDP makes its first bucket smaller only if no cap is given, and ``bucket_cap_mb`` is one.
    """
    return max(1, math.ceil(num_bytes / (cap_mb * 2**20)))


def _backend_and_size(run: Run) -> tuple[str, int]:
    return str(run.config.get("backend.name")), run.world_size


def _all_parts_ms(row: ComparisonRow) -> dict[str, float] | None:
    """Return all parts of a step, which add up to its time; None if one was not measured."""
    if row.step_time_ms is None or not set(COMPUTED).issubset(row.step_parts_ms):
        return None
    names = (*COMPUTED, StepPart.COMM, StepPart.WAIT)
    parts: dict[str, float] = {part: row.step_parts_ms.get(part, 0.0) for part in names}
    return {**parts, REST: row.step_time_ms.mean - sum(parts.values())}


def _fit(backend: str, world_size: int, points: Sequence[tuple[int, float]]) -> AllReduceFit | None:
    """Fit time = latency + bytes / bandwidth with equal weights for the relative errors."""
    import numpy as np  # takes 0.1 s, and most comparisons have nothing to fit

    sizes, times_us = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    num_sizes = len(set(sizes))
    if num_sizes < 2:
        return None
    slope, intercept = np.polyfit(sizes, times_us, 1, w=1 / times_us)
    if slope <= 0:
        return None  # larger messages were not slower: the measurement is noise
    latency_us, gb_per_s = max(0.0, float(intercept)), float(1 / (slope * 1e3))
    error = float(np.median(abs(latency_us + slope * sizes - times_us) / times_us))
    return AllReduceFit(backend, world_size, latency_us, gb_per_s, num_sizes, error)
