"""Compare tensors over ranks, bit for bit, and describe where they differ.

Ranks exchange digests. Only tensors that are split over ranks are gathered, one at a time, so a
large model needs little extra memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.checkpoint.between_ranks import digest_of
from ddp_runner.data.trees import shape_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.parallelism.shards import full_tensor, is_shard, own_part, whole_state
from ddp_runner.parallelism.stages import stages_of


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    name: str  # the guarantee
    ok: bool
    detail: str  # the compared tensors, and the numbers


def equality(name: str, tensors: Mapping[str, Tensor | None], detail: str) -> Verdict:
    """Check that there are no ``differences``; then `detail` describes the tensors. Collective."""
    sentences = differences(tensors)
    return Verdict(name, not sentences, listed(sentences, separator="; ") or detail)


def differences(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return a sentence for each tensor of a rank that is not rank 0's, bit for bit.

    The same on all ranks. A tensor that is None or missing on only some ranks is wrong, too.
    Tensors that are split over ranks are gathered. Collective: every rank must call.
    """
    present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    gathered_names = split_everywhere(present)

    def whole(name: str) -> Tensor:
        return full_tensor(present[name]) if name in gathered_names else own_part(present[name])

    by_rank = gather_objects(
        {
            name: (shape_of(tensor := whole(name)), digest_of(tensor))
            for name in dict.fromkeys((*gathered_names, *present))  # full_tensor() in one order
        }
    )
    sentences = list[str]()
    for name in dict.fromkeys(name for marks in by_rank for name in marks):
        first, *others = marks = [marks.get(name, ("none", "")) for marks in by_rank]
        ranks = [rank for rank, mark in enumerate(marks) if mark != first]
        if not ranks:
            continue
        if any(mark[0] != first[0] for mark in others):
            detail = f"by rank: {'; '.join(mark[0] for mark in marks)}"
        else:
            detail = f"largest difference {largest_difference(whole(name)):.3g}"
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        sentences.append(f"{name} on {where} is not rank 0's ({detail})")
    return sentences


def largest_difference(tensor: Tensor) -> float:
    """Return the largest difference from rank 0's tensor over all elements and ranks.

    Collective: every rank must call, with a tensor of the same shape.
    """
    values = tensor.detach().to_dense().double().contiguous()
    wanted = values.clone()
    dist.broadcast(wanted, src=0)
    largest = float((values - wanted).abs().max()) if values.numel() else 0.0
    return float(torch.tensor(gather_objects(largest), dtype=torch.float64).max())  # NaN wins


def with_other_stages(
    module: nn.Module, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Return a rank's tensors of a model, and those of its pipeline's other ranks. Collective.

    A tensor that this rank has is its own; a tied parameter has the first of its names.
    """
    if (stages := stages_of(module)) is None:
        return dict(tensors)
    first, firsts = dict[Tensor, str](), dict[str, str]()
    for name, value in whole_state(module).items():
        firsts[name] = first.setdefault(value, name)
    own = {firsts.get(name, name): value for name, value in tensors.items()}
    known = {name: value.detach().cpu() for name, value in own.items() if value is not None}
    whole = dict[str, Tensor | None]()
    for part in gather_objects(known, group=stages.group):
        whole |= {name: value.to(stages.device) for name, value in part.items()}
    return {**whole, **own}


def split_everywhere(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of the tensors that are shards on all ranks; the same on every rank.

    Gathering a tensor that is a shard on only some ranks would hang. Collective: every rank must
    call.
    """
    first, *rest = gather_objects([name for name, tensor in tensors.items() if is_shard(tensor)])
    return [name for name in first if all(name in names for names in rest)]
