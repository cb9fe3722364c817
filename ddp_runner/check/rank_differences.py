"""Compare tensors over ranks, bit for bit, and describe where they differ.

Ranks exchange digests. Only tensors that are split over ranks are gathered, one at a time, so a
large model needs little extra memory.
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
from ddp_runner.parallelism.shards import full_tensor, is_shard, own_part, shard_like

ABSENT = ("none", "")  # stands for a tensor that a rank does not have


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    name: str  # the guarantee
    ok: bool
    detail: str  # the compared tensors, and the numbers


def equality(
    name: str,
    tensors: Mapping[str, Tensor | None],
    detail: str,
    *,
    expected: Mapping[str, Tensor] | None = None,
) -> Verdict:
    """Check that there are no ``differences``; then `detail` describes the tensors. Collective."""
    sentences = differences(tensors, expected)
    return Verdict(name, not sentences, listed(sentences, separator="; ") or detail)


def differences(
    tensors: Mapping[str, Tensor | None], expected: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Return a sentence for each tensor that is wrong on a rank in any bit; the same on all ranks.

    Collective: every rank must call.

    Args:
        tensors: by name; a tensor that is None or missing on only some ranks is wrong, too.
        expected: one process's tensors by name: each rank must have its part of them. None:
            every rank must have rank 0's tensors, gathered where they are split.
    """
    present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    gathered_names = split_everywhere(present) if expected is None else []

    def actual(name: str) -> Tensor:
        return full_tensor(present[name]) if name in gathered_names else own_part(present[name])

    def wanted(name: str) -> Tensor | None:
        return None if expected is None else own_part(shard_like(expected[name], present[name]))

    by_rank = gather_objects(
        {
            name: (_mark(actual(name)), _mark(wanted(name)))
            for name in dict.fromkeys((*gathered_names, *present))  # full_tensor() in one order
        }
    )
    sentences = list[str]()
    for name in dict.fromkeys(name for marks in by_rank for name in marks):
        pairs = [marks.get(name, (ABSENT, ABSENT)) for marks in by_rank]
        if expected is None:
            pairs = [(mark, pairs[0][0]) for mark, _ in pairs]
        ranks = [rank for rank, (mark, right) in enumerate(pairs) if mark != right]
        if not ranks:
            continue
        if any(mark[0] != right[0] for mark, right in pairs):
            detail = f"by rank: {'; '.join(mark[0] for mark, _ in pairs)}"
        else:
            detail = f"largest difference {largest_difference(actual(name), wanted(name)):.3g}"
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        owner = "rank 0's" if expected is None else "one process's"
        sentences.append(f"{name} on {where} is not {owner} ({detail})")
    return sentences


def largest_difference(tensor: Tensor, wanted: Tensor | None = None) -> float:
    """Return the largest difference from `wanted` over all elements and ranks; None: rank 0's.

    Collective: every rank must call, with a tensor of the same shape to compare with rank 0's.
    """
    values = tensor.detach().to_dense().double().contiguous()
    if wanted is None:
        wanted = values.clone()
        dist.broadcast(wanted, src=0)
    largest = float((values - wanted.to(values)).abs().max()) if values.numel() else 0.0
    return float(torch.tensor(gather_objects(largest), dtype=torch.float64).max())  # NaN wins


def split_everywhere(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of the tensors that are shards on all ranks; the same on every rank.

    Gathering a tensor that is a shard on only some ranks would hang. Collective: every rank must
    call.
    """
    first, *rest = gather_objects([name for name, tensor in tensors.items() if is_shard(tensor)])
    return [name for name in first if all(name in names for names in rest)]


def _mark(tensor: Tensor | None) -> tuple[str, str]:
    """Return a tensor's shape and dtype in words, and its digest."""
    return ABSENT if tensor is None else (shape_of(tensor), digest_of(tensor))
