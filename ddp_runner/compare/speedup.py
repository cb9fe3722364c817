"""Speedups: measured over the fewest devices, and predicted from a measured all-reduce.

docs/comparing.md explains the prediction.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.compare.recorded_run import RecordedRun, Stat
from ddp_runner.compare.settings import BATCH_PER_RANK, GLOBAL_BATCH, SIZE_KEYS, identity
from ddp_runner.errors import counted
from ddp_runner.metric_names import StepPart

Stats = Mapping[str, Stat]  # results of a setting's runs, by metric
Measured = tuple[RecordedRun, Stats]  # a run of a setting, and the results of all its runs
SCALINGS = {"strong": GLOBAL_BATCH, "weak": BATCH_PER_RANK}  # the size that is constant
PER_SAMPLE = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD)
COMPUTED = (*PER_SAMPLE, StepPart.OPTIMIZER)
PARTS = {part.metric: str(part) for part in StepPart}
REST = "rest"  # the time of a step outside of its measured parts
SENT_FRACTION = {None: 1.0, "bf16": 0.5, "fp16": 0.5}  # of float32 gradients, by comm_hook


@dataclass(frozen=True)
class Prediction:
    """The predicted and the measured step of a setting."""

    samples_per_s: float
    speedup: float  # over the baseline
    parts_ms: Mapping[str, float]  # predicted
    measured_ms: Mapping[str, float]  # the same parts


@dataclass(frozen=True)
class Scaling:
    """The speed of a setting relative to its baseline."""

    batch: int  # the constant size: global for strong scaling, per rank for weak scaling
    base: str  # the baseline in words
    base_num_devices: int
    speedup: float  # ratio of samples per second
    speedup_sd: float | None  # over the setting's runs, with the baseline's mean taken as exact
    efficiency: float  # speedup divided by the ratio of devices; 1 is ideal
    predicted: Prediction | None  # from the baseline's step; None: a measurement is missing


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


def fit_all_reduces(runs: Sequence[RecordedRun]) -> tuple[AllReduceFit, ...]:
    """Fit the all-reduces that ``task=collectives`` runs have measured."""
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for run in runs:
        for call in run.record.get("collectives", ()):
            kind = (call.get("op"), call.get("reduce_op"), call.get("dtype"))
            if kind == ("all_reduce", "sum", "float32"):
                point = call["bytes"], call["latency_us"]["median"]
                points.setdefault(_backend_and_size(run), []).append(point)
    return tuple(fit for key, measured in points.items() if (fit := _fit(*key, measured)))


def speedups(
    settings: Sequence[Measured], all_reduces: Iterable[AllReduceFit]
) -> list[dict[str, Scaling]]:
    """Return the scalings of each setting by kind, strong and weak.

    Parallel jobs have no scalings: they slow each other down.
    """
    fits = {(fit.backend, fit.world_size): fit for fit in all_reduces}
    by_kind = {kind: _scalings(settings, fits, key) for kind, key in SCALINGS.items()}
    return [
        {kind: scalings[index] for kind, scalings in by_kind.items() if index in scalings}
        for index in range(len(settings))
    ]


def parts_ms(stats: Stats) -> dict[str, float]:
    """Return the mean time of each measured part of a step."""
    return {PARTS[name]: value.mean for name, value in stats.items() if name in PARTS}


def _scalings(settings: Sequence[Measured], fits: AllReduceFits, key: str) -> dict[int, Scaling]:
    """Return the scalings by index of the setting; `key` is the batch size that is constant."""
    runs = [run for run, _ in settings]

    def on(num_devices: int, indices: Sequence[int]) -> list[int]:
        return [index for index in indices if runs[index].num_devices == num_devices]

    def mean(indices: Sequence[int]) -> float:
        return statistics.fmean(settings[index][1]["perf/samples_per_s"].mean for index in indices)

    def scaling(index: int, base: Sequence[int], mode: str) -> Scaling:
        first, base_speed = runs[base[0]], mean(base)
        stat = settings[index][1]["perf/samples_per_s"]
        has_devices = first.world_size != first.num_devices
        devices = f", {counted(first.num_devices, 'device')}" if has_devices else ""
        return Scaling(
            batch=int(runs[index].setting[key]),
            base=f"{mode}{counted(first.world_size, 'rank')}{devices}",
            base_num_devices=first.num_devices,
            speedup=stat.mean / base_speed,
            speedup_sd=None if stat.sd is None else stat.sd / base_speed,
            efficiency=stat.mean / base_speed * first.num_devices / runs[index].num_devices,
            predicted=_predict(settings[index], settings[base[0]], fits),
        )

    results: dict[int, Scaling] = {}
    for modes in _by_mode(settings, key):
        on_one_device = [single for indices in modes.values() if (single := on(1, indices))]
        for indices in modes.values():
            base, mode = on(min(runs[index].num_devices for index in indices), indices), ""
            # Without a run on one device, the baseline is the fastest mode on one device.
            if runs[base[0]].num_devices > 1 and on_one_device:
                base = max(on_one_device, key=mean)
                mode = f"{runs[base[0]].setting.get('parallelism.name')}, "
            if len(on(runs[base[0]].num_devices, indices)) < len(indices):
                for index in (*indices, *base):
                    if index not in results:
                        results[index] = scaling(index, base, mode)
    return results


def _by_mode(settings: Sequence[Measured], key: str) -> Iterable[Mapping[object, Sequence[int]]]:
    """Return groups of settings with a common baseline, each by mode; a setting is its index.

    The settings of a mode differ only in the number of devices and in the other batch size.
    """
    groups: dict[object, dict[object, list[int]]] = {}
    for index, (run, stats) in enumerate(settings):
        setting, stat = run.setting, stats.get("perf/samples_per_s")
        # Not weak scaling: the work per rank shrinks as more ranks share a sample, or a fixed
        # number of virtual ranks.
        size = setting.get("parallelism.tensor_parallel_size", 1)
        shrinks = size != 1 or setting.get("batch.virtual_ranks") is not None
        is_left_out = run.is_parallel_job or (key == BATCH_PER_RANK and shrinks)
        if stat and stat.mean and setting.get(key) is not None and not is_left_out:
            same = identity(setting, without=[*SIZE_KEYS, "parallelism."]), repr(setting[key])
            modes = groups.setdefault(same, {})
            modes.setdefault(identity(setting, without=SIZE_KEYS), []).append(index)
    return groups.values()


def _predict(setting: Measured, baseline: Measured, fits: AllReduceFits) -> Prediction | None:
    """Predict the step of a setting from its baseline's; None if a measurement is missing.

    Only for modes that all-reduce gradients in buckets, as DDP does, on more ranks than the
    baseline, and without a hook of the user's own, which sends an unknown number of bytes.
    """
    (run, stats), (base, base_stats) = setting, baseline
    num_bytes = run.number("gradient_bytes")
    cap_mb = run.positive("parallelism.bucket_cap_mb")
    samples, base_samples = (each.positive("batch.global_size") for each in (run, base))
    fit = fits.get(_backend_and_size(run)) if run.comm_hook in SENT_FRACTION else None
    measured_ms, base_ms = _all_parts_ms(stats), _all_parts_ms(base_stats)
    speed = base_stats.get("perf/samples_per_s")
    if base.world_size >= run.world_size or not (num_bytes and fit and cap_mb):
        return None
    if not (samples and base_samples and measured_ms and base_ms and speed):
        return None
    growth = (samples / run.world_size) / (base_samples / base.world_size)
    latency_ms = num_buckets(num_bytes, cap_mb) * fit.latency_us / 1e3
    predicted: dict[str, float] = {part: base_ms[part] * growth for part in PER_SAMPLE}
    predicted |= {part: base_ms[part] for part in (StepPart.OPTIMIZER, REST)}
    sent_bytes = num_bytes * SENT_FRACTION[run.comm_hook]
    predicted |= {StepPart.COMM: latency_ms + sent_bytes / fit.gb_per_s / 1e6, StepPart.WAIT: 0.0}
    samples_per_s = 1000 * samples / sum(predicted.values())
    return Prediction(samples_per_s, samples_per_s / speed.mean, predicted, measured_ms)


def num_buckets(num_bytes: float, cap_mb: float) -> int:
    """Return the number of messages in which DDP sends `num_bytes` of gradients."""
    # DDP's first bucket is smaller only without a cap.
    return max(1, math.ceil(num_bytes / (cap_mb * 2**20)))


def _backend_and_size(run: RecordedRun) -> tuple[str, int]:
    return str(run.config.get("backend.name")), run.world_size


def _all_parts_ms(stats: Stats) -> dict[str, float] | None:
    """Return all parts of a step, which add up to its time; None if a part was not measured."""
    whole, measured = stats.get("perf/step_time_ms"), parts_ms(stats)
    if whole is None or not set(COMPUTED).issubset(measured):
        return None
    parts = {
        str(part): measured.get(part, 0.0) for part in (*COMPUTED, StepPart.COMM, StepPart.WAIT)
    }
    return {**parts, REST: whole.mean - sum(parts.values())}


def _fit(backend: str, world_size: int, points: Sequence[tuple[int, float]]) -> AllReduceFit | None:
    """Fit time = latency + bytes / bandwidth with equal weights for the relative errors."""
    # In closed form: importing NumPy would take half as long as a whole comparison.
    num_sizes = len({size for size, _ in points})
    if num_sizes < 2:
        return None
    weights = [1 / time_us**2 for _, time_us in points]
    mean_size, mean_us = (statistics.fmean(values, weights) for values in zip(*points, strict=True))
    centred = [(size - mean_size, time_us - mean_us) for size, time_us in points]
    covariance = sum(w * x * y for w, (x, y) in zip(weights, centred, strict=True))
    slope = covariance / sum(w * x * x for w, (x, _) in zip(weights, centred, strict=True))
    if slope <= 0:
        return None  # larger messages were not slower: the measurement is noise
    latency_us = max(0.0, mean_us - slope * mean_size)
    error = statistics.median(abs(latency_us + slope * x - y) / y for x, y in points)
    return AllReduceFit(backend, world_size, latency_us, 1 / (slope * 1e3), num_sizes, error)
