"""Verifies and times one operation on one message, and computes its latency and bandwidth.

Before each call the ranks synchronise, outside the measured time. The latency of a call is that of
its slowest rank, as with nccl-tests' ``--average 3``. The bandwidths are those of nccl-tests: for S
bytes in t seconds ``algbw`` is S/t. ``busbw`` is algbw times a factor of operation and world size,
which makes it the speed of the hardware's bottleneck:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. One GB is 1e9 bytes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_runner.collectives.messages import Prepared, synchronize
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.config.schema import CollectivesConfig
from ddp_runner.distributed import gather_objects


class WrongResultError(Exception):
    """A collective returned wrong data without an error."""


@dataclass(frozen=True)
class Measurement:
    """Latency and bandwidth of one operation on one message."""

    op: str
    dtype: str | None
    reduce_op: str | None
    bytes: int  # the whole message, over all ranks; 0 for a barrier
    latency_us: dict[str, float]  # median and p95 over calls, min and max over calls and ranks
    algbw_gb_per_s: float | None  # from the median; None for a barrier, which moves no data
    busbw_gb_per_s: float | None
    verified: bool


def measure(
    variant: Variant,
    prepared: Prepared,
    config: CollectivesConfig,
    *,
    device: torch.device,
    stop_requested: Callable[[], bool],
) -> Measurement | None:
    """Verify, time, and verify again; return None if a rank was asked to stop.

    Collective: every rank must call.

    Raises:
        WrongResultError: a rank's result was wrong; raised on every rank.
    """
    verify_result(variant, prepared, device=device)
    latencies = time_calls(
        prepared,
        warmup_steps=config.warmup_steps,
        steps=config.steps,
        device=device,
        stop_requested=stop_requested,
    )
    if latencies is None:
        return None
    measurement = summarize(variant, prepared.num_bytes, gather_objects(latencies))
    verify_result(variant, prepared, device=device)
    return measurement


def verify_result(variant: Variant, prepared: Prepared, *, device: torch.device) -> None:
    """Compare the result of one call with the expected one. Collective: every rank must call.

    Raises:
        WrongResultError: a rank's result was wrong; raised on every rank, with that rank.
    """
    prepared.reset()
    prepared.call()
    synchronize(device)
    faults = [fault for fault in gather_objects(prepared.fault()) if fault is not None]
    if faults:
        raise WrongResultError(
            f"{variant} of {prepared.num_bytes} bytes gave a wrong result: {'; '.join(faults)}"
        )


def time_calls(
    prepared: Prepared,
    *,
    warmup_steps: int,
    steps: int,
    device: torch.device,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[float] | None:
    """Return this rank's seconds for each timed call, from the call to its result on the device.

    Each call of an in-place operation works on the previous result. Return None on every rank if
    one was asked to stop. Collective: every rank must call.
    """
    latencies = []
    for _ in range(warmup_steps + steps):
        if _any_wants_stop(stop_requested()):
            return None
        start = time.perf_counter()
        prepared.call()
        synchronize(device)
        latencies.append(time.perf_counter() - start)
    return latencies[warmup_steps:]


def _any_wants_stop(want_stop: bool) -> bool:
    """Wait for all ranks; return whether one wants to stop. Collective: every rank must call."""
    flag = torch.tensor(want_stop, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def summarize(variant: Variant, num_bytes: int, by_rank: Sequence[Sequence[float]]) -> Measurement:
    """Return the latency and bandwidth of one message.

    Args:
        variant: what was measured.
        num_bytes: of the whole message.
        by_rank: for each rank the seconds of each timed call.
    """
    latencies = torch.tensor(by_rank, dtype=torch.float64) * 1e6  # (ranks, calls)
    slowest = latencies.amax(dim=0)
    median_us = float(slowest.quantile(0.5))
    algbw = busbw = None
    if variant.dtype is not None:
        algbw = num_bytes / median_us / 1e3
        busbw = algbw * OPERATIONS[variant.op].bus_factor(len(by_rank))
    return Measurement(
        op=variant.op,
        dtype=variant.dtype,
        reduce_op=variant.reduce_op,
        bytes=num_bytes,
        latency_us={
            "median": median_us,
            "p95": float(slowest.quantile(0.95)),
            "min": float(latencies.min()),
            "max": float(latencies.max()),
        },
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=busbw,
        verified=True,
    )
