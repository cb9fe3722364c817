"""One operation on one message, ready for repeated calls, and the comparison of its result."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.collectives.operations import (
    OPERATIONS,
    PERIOD,
    Patterns,
    Variant,
    torch_reduce_op,
)
from ddp_runner.distributed import gather_objects

LATE_S = 0.02  # the last rank enters a verified barrier this much later
_barriers = count()  # verified so far, the same number on every rank


@dataclass(frozen=True)
class Prepared:
    """One rank's part in an operation on one message."""

    num_bytes: int  # the whole message, rounded up to equal shares
    reset: Callable[[], None]  # sets the buffers' initial values
    call: Callable[[], object]  # collective; on a GPU it may return before the result is there
    fault: Callable[[], str | None]  # what is wrong with the result of a call after a reset


def prepare(variant: Variant, *, num_bytes: int, device: torch.device, backend: str) -> Prepared:
    """Return this rank's part in an operation on one message.

    Args:
        variant: the operation, dtype and reduction.
        num_bytes: of the message; rounded up to whole elements and equal shares.
        device: of the tensors.
        backend: of the process group: gloo, nccl or mpi.
    """
    if variant.dtype is None:
        return _prepare_barrier(device, backend)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    operation, dtype = OPERATIONS[variant.op], getattr(torch, variant.dtype)
    parts, reduce_op = num_ranks if operation.is_split else 1, variant.reduce_op or "sum"
    length = math.ceil(num_bytes / dtype.itemsize / parts)  # elements of a share
    sent = operation.sent(rank, num_ranks, reduce_op)
    expected = operation.expected(rank, num_ranks, reduce_op)
    source = torch.empty(len(sent) * length, dtype=dtype, device=device)
    target = source if operation.in_place else source.new_empty(len(expected) * length)
    # A reduction may round once per rank, in any order; an operation that only moves data is exact.
    rounds = operation.reduces and dtype.is_floating_point
    tolerance = num_ranks * torch.finfo(dtype).eps if rounds else 0.0

    def shares(patterns: Patterns, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for pattern, share in zip(patterns, buffer.view(len(patterns), length), strict=True):
            yield share, pattern.to(device=device, dtype=dtype)

    def reset() -> None:
        target.zero_()
        for share, period in shares(sent, source):
            for piece, content in _pieces(share, period):
                piece.copy_(content)

    def fault() -> str | None:
        for index, (share, period) in enumerate(shares(expected, target) if expected else ()):
            if all(torch.equal(piece, content) for piece, content in _pieces(share, period)):
                continue
            content = period.repeat(math.ceil(length / PERIOD))[:length]
            is_wrong = ~torch.isclose(share, content, rtol=tolerance, atol=0.0)
            if is_wrong.any():
                place = int(is_wrong.int().argmax())
                return (
                    f"rank {rank} holds {share[place].item()} at element {index * length + place} "
                    f"and should hold {content[place].item()} ({int(is_wrong.sum())} of the "
                    f"{length} elements of share {index} are wrong)"
                )
        return None

    call = operation.bind(source, target, torch_reduce_op(reduce_op))
    return Prepared(length * parts * dtype.itemsize, reset, call, fault)


def _pieces(share: Tensor, period: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the share's whole periods, then the rest, each with its content, without a copy."""
    whole = len(share) // PERIOD * PERIOD
    rows, rest = share[:whole].view(-1, PERIOD), share[whole:]
    yield rows, period.expand_as(rows)
    yield rest, period[: len(rest)]


def _prepare_barrier(device: torch.device, backend: str) -> Prepared:
    """Return a barrier, and a test that no rank leaves it before all have entered."""
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
    device_ids = [device.index] if backend == "nccl" else None
    return Prepared(0, reset, partial(dist.barrier, device_ids=device_ids), fault)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unsupported_reason(variant: Variant, *, device: torch.device, backend: str) -> str | None:
    """Try a tiny message; return why the backend does not support it, or None if it does.

    Every rank returns the same. Collective: every rank must call.
    """
    reason = None
    try:
        prepared = prepare(variant, num_bytes=1, device=device, backend=backend)
        prepared.reset()
        prepared.call()
        synchronize(device)
    except (RuntimeError, TypeError, ValueError) as error:
        # A lost rank does not count as unsupported: the gather below cannot reach it and raises.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    return next((reason for reason in gather_objects(reason) if reason is not None), None)
