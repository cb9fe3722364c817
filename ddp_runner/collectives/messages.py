"""One operation on one message, ready to be called again and again, and its check.

Used by ``collectives``; the operations are in ``collective_ops``.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.collectives.operations import OPERATIONS, PERIOD, REDUCE_OPS, Patterns, Variant
from ddp_runner.distributed import gather_objects

LATE_S = 0.02  # by which the last rank comes late to a barrier that is checked
_barriers = count()  # checked so far, by every rank alike


@dataclass(frozen=True)
class Prepared:
    """One rank's part of an operation on one message."""

    num_bytes: int  # the whole message, as large as equal shares make it
    reset: Callable[[], None]  # gives the buffers their initial values
    call: Callable[[], object]  # collective; on a GPU it may return before the result is there
    fault: Callable[[], str | None]  # what is wrong with the result of a call after a reset


def prepare(variant: Variant, *, num_bytes: int, device: torch.device, backend: str) -> Prepared:
    """Return this rank's part of an operation on one message.

    Args:
        variant: the operation, dtype and reduction.
        num_bytes: of the message; rounded up to whole elements and equal shares.
        device: where the tensors lie.
        backend: of the process group: gloo, nccl or mpi.
    """
    if variant.dtype is None:
        return _prepare_barrier(device, backend)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    operation, dtype = OPERATIONS[variant.op], getattr(torch, variant.dtype)
    parts, reduce_op = num_ranks if operation.is_split else 1, variant.reduce_op or "sum"
    length = math.ceil(num_bytes / dtype.itemsize / parts)  # elements of a share
    sent, due = (of(rank, num_ranks, reduce_op) for of in (operation.sent, operation.due))
    source = torch.empty(len(sent) * length, dtype=dtype, device=device)
    target = source if operation.in_place else source.new_empty(len(due) * length)
    # A reduction may round at each rank, in an order of its own; what is only moved stays as it is.
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
        for index, (share, period) in enumerate(shares(due, target) if due else ()):
            if all(torch.equal(piece, content) for piece, content in _pieces(share, period)):
                continue
            content = period.repeat(math.ceil(length / PERIOD))[:length]
            is_wrong = ~torch.isclose(share, content, rtol=tolerance, atol=0.0)
            if is_wrong.any():
                place = int(is_wrong.int().argmax())
                return (
                    f"rank {rank} holds {share[place].item()} at element {index * length + place} "
                    f"where {content[place].item()} is due ({int(is_wrong.sum())} of the "
                    f"{length} elements of share {index} are wrong)"
                )
        return None

    call = operation.bind(source, target, REDUCE_OPS[reduce_op])
    return Prepared(length * parts * dtype.itemsize, reset, call, fault)


def _pieces(share: Tensor, period: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the share's whole periods and the rest, each with its content: nothing is copied."""
    whole = len(share) // PERIOD * PERIOD
    rows, rest = share[:whole].view(-1, PERIOD), share[whole:]
    yield rows, period.expand_as(rows)
    yield rest, period[: len(rest)]


def _prepare_barrier(device: torch.device, backend: str) -> Prepared:
    """Return a barrier, with a check that nobody leaves it before all have come."""
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
        return f"rank {rank} left it when {arrived} of {num_ranks} ranks had come"

    # Without device_ids the group's gloo half would do it.
    device_ids = [device.index] if backend == "nccl" else None
    return Prepared(0, reset, partial(dist.barrier, device_ids=device_ids), fault)


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def refusal(variant: Variant, *, device: torch.device, backend: str) -> str | None:
    """Return why this torch's backend cannot do it, None if it can: tried on a tiny message.

    All ranks return the same. Collective: every rank must call.
    """
    reason = None
    try:
        prepared = prepare(variant, num_bytes=1, device=device, backend=backend)
        prepared.reset()
        prepared.call()
        finish(device)
    except (RuntimeError, TypeError, ValueError) as error:
        # A peer that was lost is no refusal: the next line cannot reach it and raises.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    return next((told for told in gather_objects(reason) if told is not None), None)
