"""How one operation on one message is checked and timed, and the figures that follow.

Used by ``collectives``. Before each call the ranks meet, so that all start together, outside the
time. The latency of a call is that of its slowest rank, as with nccl-tests' ``--average 3``.
Bandwidths are nccl-tests', too: with S bytes in t seconds ``algbw`` is S/t, and ``busbw`` is algbw
times a factor of operation and world size that makes it the speed of the hardware's bottleneck:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. GB are 1e9 bytes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_runner.collectives.messages import Prepared, finish
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.config.schema import CollectivesConfig
from ddp_runner.distributed import gather_objects


class WrongResultError(Exception):
    """A collective returned wrong data, and no error."""


@dataclass(frozen=True)
class Row:
    """What was measured of one operation on one message."""

    op: str
    dtype: str | None
    reduce_op: str | None
    bytes: int  # the whole message, over all ranks; 0 of a barrier
    latency_us: dict[str, float]  # median and p95 over calls, min and max over calls and ranks
    algbw_gb_per_s: float | None  # from the median; None of a barrier, which moves no data
    busbw_gb_per_s: float | None
    verified: bool


def measure(
    variant: Variant,
    prepared: Prepared,
    asked: CollectivesConfig,
    *,
    device: torch.device,
    stop_requested: Callable[[], bool],
) -> Row | None:
    """Check, time and check again; None: a rank was asked to stop. Collective: every rank.

    Raises:
        WrongResultError: a rank's result was wrong; on every rank.
    """
    check(variant, prepared, device=device)
    latencies = time_calls(
        prepared,
        warmup_steps=asked.warmup_steps,
        steps=asked.steps,
        device=device,
        stop_requested=stop_requested,
    )
    if latencies is None:
        return None
    row = summary(variant, prepared.num_bytes, gather_objects(latencies))
    check(variant, prepared, device=device)
    return row


def check(variant: Variant, prepared: Prepared, *, device: torch.device) -> None:
    """Compare the result of one call with what is due. Collective: every rank must call.

    Raises:
        WrongResultError: a rank's result was wrong; on every rank, naming that one.
    """
    prepared.reset()
    prepared.call()
    finish(device)
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
    """Return this rank's seconds of each timed call, from the call to its result on the device.

    The calls of an in-place operation work on each other's results. None on all ranks alike: a
    rank was asked to stop. Collective: every rank must call.
    """
    latencies = []
    for _ in range(warmup_steps + steps):
        if _meet(stop_requested()):
            return None
        start = time.perf_counter()
        prepared.call()
        finish(device)
        latencies.append(time.perf_counter() - start)
    return latencies[warmup_steps:]


def _meet(want_stop: bool) -> bool:
    """Wait for all ranks; return whether any wants to stop. Collective: every rank must call."""
    flag = torch.tensor(want_stop, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def summary(variant: Variant, num_bytes: int, by_rank: Sequence[Sequence[float]]) -> Row:
    """Return the figures of one message.

    Args:
        variant: what was measured.
        num_bytes: the whole message.
        by_rank: seconds of each timed call, of each rank.
    """
    latencies = torch.tensor(by_rank, dtype=torch.float64) * 1e6  # (ranks, calls)
    slowest = latencies.amax(dim=0)
    median_us = float(slowest.quantile(0.5))
    algbw = busbw = None
    if variant.dtype is not None:
        algbw = num_bytes / median_us / 1e3
        busbw = algbw * OPERATIONS[variant.op].bus_factor(len(by_rank))
    return Row(
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
