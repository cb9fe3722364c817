"""Measures once what the ranks of a run can do at most, to compare its steps with it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import typed
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.tracking.run_record import RunFields
from ddp_runner.train.flops import FlopCounter, matmul_flops_per_s, synchronize

T = TypeVar("T")
REPEATS = 3  # of all all-reduces of a step, after one to warm up
MIB = 2**20


@dataclass(frozen=True)
class Peaks:
    """What was measured, over all ranks; None where it cannot be measured."""

    flops_per_sample: float | None = None  # of a forward and backward
    flops_per_s: float | None = None  # of matrix products, on all devices at once
    all_reduce_bytes: Sequence[int] = ()  # of each all-reduce of a step
    all_reduce_ms: float | None = None  # their mean: one after another, while nothing is computed

    def metrics(self, *, samples_per_s: float) -> dict[str, float]:
        """Return the metrics of a log line."""
        metrics, sizes = dict[str, float](), self.all_reduce_bytes
        if self.flops_per_sample and self.flops_per_s:
            metrics["perf/mfu"] = self.flops_per_sample * samples_per_s / self.flops_per_s
        if self.all_reduce_ms is not None:
            metrics["perf/all_reduces"] = len(sizes)
            metrics["perf/all_reduce_mib"] = sum(sizes) / len(sizes) / MIB
            metrics["perf/all_reduce_ms"] = self.all_reduce_ms
        return metrics

    def fields(self) -> RunFields:
        """Return what run.json keeps of it."""
        return RunFields(
            flops_per_sample=self.flops_per_sample, matmul_flops_per_s=self.flops_per_s
        )


def measure_peaks(
    counter: FlopCounter,
    *,
    all_reduces: Sequence[int],
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    model_ranks: int = 1,
) -> Peaks:
    """Measure what a run's ranks can do. Collective: every rank must call.

    What cannot be measured on one rank is None on all, and the rank's log says why.

    Args:
        counter: of this rank's operations of a step.
        all_reduces: bytes of each all-reduce of a step.
        devices: of this rank.
        dtype: of the matrix products in a forward.
        group: the ranks of the loop; None: all.
        model_ranks: so many neighbouring ranks compute each sample together.
    """
    own_peak = None
    if (flops := counter.flops) is None:
        _log_missing("perf/mfu", counter.why_unknown)
    buffer = _tried(
        lambda: torch.zeros(max(all_reduces, default=0) // 4, device=devices[0]),
        missing="perf/all_reduce_ms",
    )
    # A rank that lacks memory must not leave the others alone in an all-reduce.
    num_ready, num_ranks = sum_over_ranks([buffer is not None, 1], group=group)
    all_reduce_ms = None
    if buffer is not None and num_ready == num_ranks and all_reduces:
        all_reduce_ms = _all_reduce_ms(buffer, all_reduces, group=group)
    del buffer
    if flops is not None:
        own_peak = _tried(lambda: matmul_flops_per_s(devices, dtype), missing="perf/mfu")
    num_known, total_flops, num_samples, peak = sum_over_ranks(
        [own_peak is not None, flops or 0, counter.num_samples, own_peak or 0], group=group
    )
    is_known = num_known == num_ranks
    return Peaks(
        flops_per_sample=total_flops * model_ranks / num_samples if is_known else None,
        flops_per_s=peak if is_known else None,
        all_reduce_bytes=tuple(all_reduces),
        all_reduce_ms=all_reduce_ms,
    )


def _tried(measure: Callable[[], T], *, missing: str) -> T | None:
    """Measure; if it fails, as without memory, log why and return None."""
    try:
        return measure()
    except Exception as error:
        _log_missing(missing, typed(error))
        return None


def _log_missing(metric: str, reason: str) -> None:
    log_to_file(f"this run has no {metric}: {reason}")


def _all_reduce_ms(
    buffer: Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None
) -> float:
    """Return the mean milliseconds of all-reduces of these bytes. Collective."""
    began = 0.0
    for repeat in range(1 + REPEATS):
        if repeat == 1:
            synchronize(buffer.device)
            began = time.perf_counter()
        for size in sizes:
            dist.all_reduce(buffer[: size // 4], group=group)
    synchronize(buffer.device)
    return 1000 * (time.perf_counter() - began) / (REPEATS * len(sizes))
