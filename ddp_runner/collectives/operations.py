"""The operations of ``task=collectives``: calls, inputs, expected results and bus factors.

Inputs are small integers computed from rank, share and position. So each rank knows its expected
result, and detects a truncated message, another rank's share or a buffer that was never filled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

PERIOD = 101  # of the inputs, in elements; a prime, so that shares begin differently
Patterns = list[Tensor]  # one period of each share of a buffer, int64 or float64


@dataclass(frozen=True)
class Variant:
    """An operation with a dtype and a reduction, measured at all message sizes."""

    op: str
    dtype: str | None = None  # None: a barrier moves no data
    reduce_op: str | None = None  # None: the operation does not reduce

    def __str__(self) -> str:
        return "_".join(filter(None, (self.op, self.dtype, self.reduce_op)))


@dataclass(frozen=True)
class Operation:
    """The call of an operation, and its input and expected result on each rank.

    ``sent`` and ``expected`` map rank, world size and reduction to the shares of the buffer; the
    list is empty if this rank sends, or receives, nothing.
    """

    bind: Callable[[Tensor, Tensor, dist.ReduceOp.RedOpType], Callable[[], object]]
    expected: Callable[[int, int, str], Patterns]
    sent: Callable[[int, int, str], Patterns] = lambda rank, world_size, reduce_op: [values(rank)]
    bus_factor: Callable[[int], float] = lambda world_size: 1.0
    is_split: bool = False  # each rank holds a share of the message; False: the whole message
    in_place: bool = False
    reduces: bool = False


def values(rank: int, share: int = 0) -> Tensor:
    """Return a period of the input of an operation that only moves data: int64, 0 to 100."""
    return (torch.arange(PERIOD) + 37 * rank + 13 * share) % PERIOD


def addends(reduce_op: str, rank: int, share: int = 0) -> Tensor:
    """Return a period of a rank's input to a reduction; small, hence exact in any dtype."""
    if reduce_op == "product":
        return 1 + (values(rank, share) % 8 == 0).long()
    return values(rank, share) % 7


def reduced(reduce_op: str, world_size: int, share: int = 0) -> Tensor:
    """Return a period of the reduction of all ranks' addends: int64, or float64 for a mean."""
    by_rank = torch.stack([addends(reduce_op, rank, share) for rank in range(world_size)])
    return REDUCTIONS[reduce_op][1](by_rank)


# By the config's name: torch's reduction over ranks, and the same for a tensor (ranks, elements).
REDUCTIONS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, lambda by_rank: by_rank.sum(0)),
    "mean": (dist.ReduceOp.AVG, lambda by_rank: by_rank.double().mean(0)),
    "max": (dist.ReduceOp.MAX, lambda by_rank: by_rank.amax(0)),
    "min": (dist.ReduceOp.MIN, lambda by_rank: by_rank.amin(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda by_rank: by_rank.prod(0)),
}


def _scatter(source: Tensor, target: Tensor, _: object) -> Callable[[], object]:
    shares = list(source.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    return partial(dist.scatter, target, shares, src=0)


def _gather(source: Tensor, target: Tensor, _: object) -> Callable[[], object]:
    shares = list(target.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    return partial(dist.gather, source, shares, dst=0)


def _send_recv(source: Tensor, target: Tensor, _: object) -> Callable[[], object]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, source, (rank + 1) % num_ranks)
    receives = dist.P2POp(dist.irecv, target, (rank - 1) % num_ranks)

    def call() -> None:
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return call


def _ring(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


# The bus factors are from https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/*.cu. In
# send_recv each rank sends to the next while it receives from the previous. The root is rank 0.
OPERATIONS = {
    "broadcast": Operation(
        bind=lambda source, target, _: partial(dist.broadcast, source, src=0),
        expected=lambda rank, n, _: [values(0)],
        in_place=True,
    ),
    "scatter": Operation(
        bind=_scatter,
        sent=lambda rank, n, _: [] if rank else [values(0, share) for share in range(n)],
        expected=lambda rank, n, _: [values(0, rank)],
        bus_factor=_ring,
        is_split=True,
    ),
    "gather": Operation(
        bind=_gather,
        expected=lambda rank, n, _: [] if rank else [values(sender) for sender in range(n)],
        bus_factor=_ring,
        is_split=True,
    ),
    "reduce": Operation(
        bind=lambda source, target, op: partial(dist.reduce, source, dst=0, op=op),
        sent=lambda rank, n, op: [addends(op, rank)],
        expected=lambda rank, n, op: [] if rank else [reduced(op, n)],
        in_place=True,
        reduces=True,
    ),
    "all_reduce": Operation(
        bind=lambda source, target, op: partial(dist.all_reduce, source, op=op),
        sent=lambda rank, n, op: [addends(op, rank)],
        expected=lambda rank, n, op: [reduced(op, n)],
        bus_factor=lambda n: 2 * _ring(n),
        in_place=True,
        reduces=True,
    ),
    "all_gather": Operation(
        bind=lambda source, target, _: partial(dist.all_gather_into_tensor, target, source),
        expected=lambda rank, n, _: [values(sender) for sender in range(n)],
        bus_factor=_ring,
        is_split=True,
    ),
    "reduce_scatter": Operation(
        bind=lambda source, target, op: partial(dist.reduce_scatter_tensor, target, source, op=op),
        sent=lambda rank, n, op: [addends(op, rank, share) for share in range(n)],
        expected=lambda rank, n, op: [reduced(op, n, rank)],
        bus_factor=_ring,
        is_split=True,
        reduces=True,
    ),
    "all_to_all": Operation(
        bind=lambda source, target, _: partial(dist.all_to_all_single, target, source),
        sent=lambda rank, n, _: [values(rank, share) for share in range(n)],
        expected=lambda rank, n, _: [values(sender, rank) for sender in range(n)],
        bus_factor=_ring,
        is_split=True,
    ),
    "send_recv": Operation(bind=_send_recv, expected=lambda rank, n, _: [values((rank - 1) % n)]),
}
