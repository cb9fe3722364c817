"""Prepares, verifies and times a collective operation on a message.

Before each timed call the ranks synchronise, outside the measured time. The latency of a call is
its slowest rank's, like nccl-tests' ``--average 3``. The bandwidths follow nccl-tests: ``algbw`` is
bytes per second; ``busbw`` multiplies it by a factor of operation and world size, so that it is
the speed of the hardware's bottleneck. A GB is 1e9 bytes.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.collectives.operations import OPERATIONS, PERIOD, REDUCTIONS, Variant
from ddp_runner.config.sections import CollectivesConfig
from ddp_runner.device import synchronize
from ddp_runner.distributed import gather_objects

LATE_S = 0.02  # delay of the last rank before a verified barrier
_barriers = count()  # numbers the verified barriers, the same on every rank


class WrongResultError(Exception):
    """A collective returned wrong data without an error."""


@dataclass(frozen=True)
class Measurement:
    """Latency and bandwidth of an operation on a message."""

    op: str
    dtype: str | None
    reduce_op: str | None
    bytes: int  # the whole message, over all ranks; 0 for a barrier
    latency_us: dict[str, float]  # median and p95 over calls, min and max over calls and ranks
    algbw_gb_per_s: float | None  # from the median; None for a barrier, which moves no data
    busbw_gb_per_s: float | None


@dataclass(frozen=True)
class PreparedCall:
    """A rank's part in an operation on a message."""

    variant: Variant
    device: torch.device
    num_bytes: int  # the whole message, rounded up to whole elements and equal shares
    reset: Callable[[], None]  # sets the buffers' initial values
    call: Callable[[], object]  # collective; on a GPU it may return before the result is there
    fault: Callable[[], str | None]  # describes a wrong result of a call after a reset

    def run(self) -> None:
        """Call the operation, and wait for the result. Collective: every rank must call."""
        self.call()
        synchronize([self.device])

    def verify(self) -> None:
        """Compare the result of a call with the expected result. Collective: every rank must call.

        Raises:
            WrongResultError: a rank's result was wrong; raised on every rank, and names the rank.
        """
        self.reset()
        self.run()
        faults = [fault for fault in gather_objects(self.fault()) if fault is not None]
        if faults:
            raise WrongResultError(
                f"{self.variant} of {self.num_bytes} bytes gave a wrong result: {'; '.join(faults)}"
            )


def time_calls(
    prepared: PreparedCall,
    config: CollectivesConfig,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[float] | None:
    """Return this rank's seconds for each timed call, from the call to its result on the device.

    Each call of an in-place operation works on the previous result. Return None on every rank if
    any rank was asked to stop. Collective: every rank must call.
    """
    latencies = []
    for _ in range(config.warmup_steps + config.steps):
        is_stopping = torch.tensor(stop_requested(), dtype=torch.int32)
        dist.all_reduce(is_stopping, op=dist.ReduceOp.MAX)  # also makes the ranks begin together
        if is_stopping:
            return None
        start = time.perf_counter()
        prepared.run()
        latencies.append(time.perf_counter() - start)
    return latencies[config.warmup_steps :]


def summarize(variant: Variant, num_bytes: int, by_rank: Sequence[Sequence[float]]) -> Measurement:
    """Return latency and bandwidth, from each rank's seconds for each timed call."""
    latencies = torch.tensor(by_rank, dtype=torch.float64) * 1e6  # (ranks, calls)
    slowest = latencies.amax(dim=0)
    median_us = float(slowest.quantile(0.5))
    algbw = busbw = None
    if variant.dtype is not None:
        algbw = num_bytes / median_us / 1e3
        busbw = algbw * OPERATIONS[variant.op].bus_factor(len(by_rank))
    return Measurement(
        **asdict(variant),
        bytes=num_bytes,
        latency_us={
            "median": median_us,
            "p95": float(slowest.quantile(0.95)),
            "min": float(latencies.min()),
            "max": float(latencies.max()),
        },
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=busbw,
    )


def unsupported_reason(variant: Variant, *, device: torch.device) -> str | None:
    """Return why the backend does not support a variant, the same on every rank; None if it does.

    Collective: every rank must call.
    """
    reason = None
    try:
        prepared = prepare(variant, num_bytes=1, device=device)
        prepared.reset()
        prepared.run()
    except (RuntimeError, TypeError, ValueError) as error:
        # A lost rank also ends here; then the gather below raises.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    return next((reason for reason in gather_objects(reason) if reason is not None), None)


def prepare(variant: Variant, *, num_bytes: int, device: torch.device) -> PreparedCall:
    """Return this rank's part in an operation on a message."""
    if variant.dtype is None:
        return _prepare_barrier(variant, device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    operation, dtype = OPERATIONS[variant.op], getattr(torch, variant.dtype)
    parts, reduce_op = num_ranks if operation.is_split else 1, variant.reduce_op or "sum"
    length = math.ceil(num_bytes / dtype.itemsize / parts)  # elements of a share
    sent = operation.sent(rank, num_ranks, reduce_op)
    expected = operation.expected(rank, num_ranks, reduce_op)
    source = torch.empty(len(sent) * length, dtype=dtype, device=device)
    target = source if operation.in_place else source.new_empty(len(expected) * length)
    # A reduction may round once per rank, in any order; moving data is exact.
    rounds = operation.reduces and dtype.is_floating_point
    tolerance = num_ranks * torch.finfo(dtype).eps if rounds else 0.0

    def filled(period: Tensor) -> Tensor:
        return period.to(source).repeat(math.ceil(length / PERIOD))[:length]

    def reset() -> None:
        target.zero_()
        for share, period in zip(source.view(-1, length), sent, strict=True):
            share.copy_(filled(period))

    def fault() -> str | None:
        for index, period in enumerate(expected):
            share, correct = target[index * length :][:length], filled(period)
            if torch.equal(share, correct):
                continue
            is_wrong = ~torch.isclose(share, correct, rtol=tolerance, atol=0.0)
            if is_wrong.any():
                first = int(is_wrong.int().argmax())
                return (
                    f"rank {rank} holds {share[first].item()} at element {index * length + first} "
                    f"and should hold {correct[first].item()} ({int(is_wrong.sum())} of the "
                    f"{length} elements of share {index} are wrong)"
                )
        return None

    call = operation.bind(source, target, REDUCTIONS[reduce_op][0])
    return PreparedCall(variant, device, length * parts * dtype.itemsize, reset, call, fault)


def _prepare_barrier(variant: Variant, device: torch.device) -> PreparedCall:
    """Return a barrier, with a check that no rank leaves it before all have entered."""
    rank, num_ranks, store = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert store is not None
    arrivals = store.get_group_store()
    key = ""

    def reset() -> None:
        nonlocal key
        key = f"barrier-{next(_barriers)}"
        if rank == num_ranks - 1:
            time.sleep(LATE_S)
        arrivals.add(key, 1)

    def fault() -> str | None:
        arrived = arrivals.add(key, 0)
        if arrived == num_ranks:
            return None
        return f"rank {rank} left it when {arrived} of {num_ranks} ranks had entered"

    # Without device_ids the group's gloo backend would run the barrier.
    device_ids = None if device.type == "cpu" else [device.index]
    call = partial(dist.barrier, device_ids=device_ids)
    return PreparedCall(variant, device, 0, reset, call, fault)
