"""Compares tensors over ranks, bit for bit, and says in a sentence where they differ.

Ranks exchange digests. Nothing is gathered but a tensor that is split over ranks, one at a time, so
a large model needs little extra memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.checkpoint.between_ranks import digest_of
from ddp_runner.data.trees import shape_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.parallelism.shards import is_shard, like, own_part, whole

ABSENT = ("none", "")  # the mark of a tensor that a rank does not have


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    name: str  # the guarantee
    ok: bool
    detail: str  # what was compared, and the numbers


def equality(
    name: str,
    tensors: Mapping[str, Tensor | None],
    detail: str,
    *,
    expected: Mapping[str, Tensor] | None = None,
) -> Verdict:
    """Check that there are no ``differences``; `detail` describes the tensors then. Collective."""
    sentences = differences(tensors, expected)
    return Verdict(name, not sentences, listed(sentences, separator="; ") or detail)


def differences(
    tensors: Mapping[str, Tensor | None], expected: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Return a sentence for each tensor that is wrong on a rank in any bit; the same on all ranks.

    Collective: every rank must call.

    Args:
        tensors: by name; a tensor that is None or missing on only some ranks is wrong, too.
        expected: what a process on its own has, by name: a rank must have its part of that. None:
            every rank must have rank 0's tensors, put together where they are split.
    """
    present = {name: one.detach() for name, one in tensors.items() if one is not None}
    joined = split_everywhere(present) if expected is None else []

    def found(name: str) -> Tensor:
        return whole(present[name]) if name in joined else own_part(present[name])

    def wanted(name: str) -> Tensor | None:
        return None if expected is None else own_part(like(expected[name], present[name]))

    by_rank = gather_objects(
        {
            name: (_mark(found(name)), _mark(wanted(name)))
            for name in dict.fromkeys((*joined, *present))  # whole() in one order on all ranks
        }
    )
    sentences = list[str]()
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        marks = [of_rank.get(name, (ABSENT, ABSENT)) for of_rank in by_rank]
        if expected is None:
            marks = [(own, marks[0][0]) for own, _ in marks]
        ranks = [rank for rank, (own, right) in enumerate(marks) if own != right]
        if not ranks:
            continue
        if any(own[0] != right[0] for own, right in marks):
            what = f"by rank: {'; '.join(own[0] for own, _ in marks)}"
        else:
            what = f"largest difference {largest_difference(found(name), wanted(name)):.3g}"
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        whose = "rank 0's" if expected is None else "one process's"
        sentences.append(f"{name} on {where} is not {whose} ({what})")
    return sentences


def largest_difference(tensor: Tensor, wanted: Tensor | None = None) -> float:
    """Return how far an element of any rank is from the one wanted; None: from rank 0's.

    Collective: every rank must call, with a tensor of the same shape if rank 0's is wanted.
    """
    own = tensor.detach().to_dense().double().contiguous()
    if wanted is None:
        wanted = own.clone()
        dist.broadcast(wanted, src=0)
    farthest = float((own - wanted.to(own)).abs().max()) if own.numel() else 0.0
    return float(torch.tensor(gather_objects(farthest), dtype=torch.float64).max())  # NaN wins


def split_everywhere(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of the tensors that are split over ranks; the same on every rank.

    One that is a shard on some ranks alone is not among them: to put it together would wait for
    the others. Collective: every rank must call.
    """
    split = [name for name, tensor in tensors.items() if is_shard(tensor)]
    first, *others = gather_objects(split)
    return [name for name in first if all(name in names for names in others)]


def _mark(tensor: Tensor | None) -> tuple[str, str]:
    """Return a tensor's shape and dtype in words, and its digest."""
    return ABSENT if tensor is None else (shape_of(tensor), digest_of(tensor))
