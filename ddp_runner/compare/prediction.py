"""Predicted step times: the computing of the baseline plus a measured all-reduce.

The time for computing grows with the samples per rank, the optimizer and the rest stay the same,
and DDP adds the all-reduce of its gradients, bucket by bucket, with no overlap with the backward.
``task=collectives`` has measured the all-reduce with the same backend and world size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.compare.run import Run
from ddp_runner.metric_names import StepPart

PER_SAMPLE = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD)
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

    def time_ms(self, num_bytes: int, num_messages: int) -> float:
        """Return the time for so many bytes in so many messages."""
        return num_messages * self.latency_us / 1e3 + num_bytes / self.gb_per_s / 1e6


AllReduceFits = Mapping[tuple[str, int], AllReduceFit]  # by backend and world size


@dataclass(frozen=True)
class MeasuredStep:
    """The mean step of a setting."""

    run: Run  # any run of the setting
    samples_per_s: float
    step_time_ms: float
    parts_ms: Mapping[str, float]  # those that were measured


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a row, beside the measured step."""

    samples_per_s: float
    speedup: float  # over the baseline
    parts_ms: Mapping[str, float]  # predicted
    measured_ms: Mapping[str, float]  # the same parts


def fit_all_reduces(runs: Sequence[Run]) -> AllReduceFits:
    """Return what ``task=collectives`` runs have measured."""
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for run in runs:
        key = (str(run.config.get("backend.name")), run.world_size)
        for call in run.record.get("collectives", ()):
            kind = (call.get("op"), call.get("reduce_op"), call.get("dtype"))
            if kind == ("all_reduce", "sum", "float32"):
                points.setdefault(key, []).append((call["bytes"], call["latency_us"]["median"]))
    fits = [_fit(backend, ranks, measured) for (backend, ranks), measured in points.items()]
    return {(fit.backend, fit.world_size): fit for fit in fits if fit is not None}


def predict(step: MeasuredStep, base: MeasuredStep, fits: AllReduceFits) -> Prediction | None:
    """Predict the step of a setting from the baseline's; None if a measurement is missing.

    Only modes that all-reduce their gradients in buckets, as DDP does, have a prediction.
    """
    run = step.run
    num_bytes = run.record.get("gradient_bytes")
    cap_mb = run.config.get("parallelism.bucket_cap_mb")
    fit = fits.get((str(run.config.get("backend.name")), run.world_size))
    measured_ms, base_ms = _all_parts_ms(step), _all_parts_ms(base)
    if not (measured_ms and base_ms and fit and num_bytes and cap_mb):
        return None
    samples = int(run.config["batch.global_size"])
    base_samples = int(base.run.config["batch.global_size"])
    growth = (samples / run.world_size) / (base_samples / base.run.world_size)
    parts_ms: dict[str, float] = {part: base_ms[part] * growth for part in PER_SAMPLE}
    parts_ms |= {part: base_ms[part] for part in (StepPart.OPTIMIZER, REST)}
    parts_ms[StepPart.COMM] = fit.time_ms(num_bytes, num_buckets(num_bytes, cap_mb))
    parts_ms[StepPart.WAIT] = 0.0
    samples_per_s = 1000 * samples / sum(parts_ms.values())
    return Prediction(samples_per_s, samples_per_s / base.samples_per_s, parts_ms, measured_ms)


def num_buckets(num_bytes: int, cap_mb: float) -> int:
    """Return the number of messages in which DDP sends gradients of so many bytes.

    DDP makes its first bucket smaller only if no cap is given, and ``bucket_cap_mb`` is one.
    """
    return max(1, math.ceil(num_bytes / (cap_mb * 2**20)))


def _all_parts_ms(step: MeasuredStep) -> dict[str, float] | None:
    """Return all parts of a step, which add up to its time; None if one was not measured."""
    needed = (*PER_SAMPLE, StepPart.OPTIMIZER)
    if not set(needed).issubset(step.parts_ms):
        return None
    names = (*needed, StepPart.COMM, StepPart.WAIT)
    parts: dict[str, float] = {part: step.parts_ms.get(part, 0.0) for part in names}
    return {**parts, REST: step.step_time_ms - sum(parts.values())}


def _fit(backend: str, world_size: int, points: Sequence[tuple[int, float]]) -> AllReduceFit | None:
    """Fit time = latency + bytes / bandwidth with equal weights for the relative errors."""
    import numpy as np  # takes 0.1 s, and most comparisons have nothing to fit

    sizes, times_us = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    if len(set(sizes)) < 2:
        return None
    slope, intercept = np.polyfit(sizes, times_us, 1, w=1 / times_us)
    if slope <= 0:
        return None  # larger messages were not slower: the measurement is noise
    latency_us = max(0.0, float(intercept))
    errors = abs(latency_us + slope * sizes - times_us) / times_us
    return AllReduceFit(
        backend=backend,
        world_size=world_size,
        latency_us=latency_us,
        gb_per_s=float(1 / (slope * 1e3)),
        num_sizes=len(set(sizes)),
        error=float(np.median(errors)),
    )
