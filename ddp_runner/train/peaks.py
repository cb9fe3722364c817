"""Measures once how many operations a sample takes, and how many the ranks can do per second."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import typed
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.tracking.run_record import RunFields
from ddp_runner.train.flops import FlopCounter, matmul_flops_per_s


@dataclass(frozen=True)
class Peaks:
    """What was measured, over all ranks; None where it cannot be measured."""

    flops_per_sample: float | None = None  # of a forward and backward
    flops_per_s: float | None = None  # of matrix products, on all devices at once

    def metrics(self, *, samples_per_s: float) -> dict[str, float]:
        """Return the metrics of a log line."""
        if not (self.flops_per_sample and self.flops_per_s):
            return {}
        return {"perf/mfu": self.flops_per_sample * samples_per_s / self.flops_per_s}

    def fields(self) -> RunFields:
        """Return what run.json keeps of it."""
        return RunFields(
            flops_per_sample=self.flops_per_sample, matmul_flops_per_s=self.flops_per_s
        )


def measure_peaks(
    counter: FlopCounter,
    *,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    model_ranks: int = 1,
) -> Peaks:
    """Measure what a run's ranks can do. Collective: every rank must call.

    What cannot be measured on one rank is None on all, and the rank's log says why.

    Args:
        counter: of this rank's operations of a step.
        devices: of this rank.
        dtype: of the matrix products in a forward.
        group: the ranks of the loop; None: all.
        model_ranks: so many neighbouring ranks compute each sample together.
    """
    own_peak, reason, flops = None, counter.why_unknown, counter.flops
    if flops is not None:
        try:
            own_peak = matmul_flops_per_s(devices, dtype)
        except Exception as error:  # such as a lack of memory: no reason to end the run
            reason = typed(error)
    if own_peak is None:
        log_to_file(f"this run has no perf/mfu: {reason}")
    num_known, num_ranks, total_flops, num_samples, peak = sum_over_ranks(
        [own_peak is not None, 1, flops or 0, counter.num_samples, own_peak or 0], group=group
    )
    if num_known < num_ranks:
        return Peaks()
    return Peaks(flops_per_sample=total_flops * model_ranks / num_samples, flops_per_s=peak)
