"""Compares tensors over ranks, and holds the result of a check.

Ranks exchange digests. Where these differ, the minimum and maximum over ranks show by how much. No
tensor is gathered, so a large model needs little extra memory.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.train.loop import DTYPES
from ddp_runner.train.state import TrainState

# How far apart results may be if they differ only by rounding, relative to the largest value: a GPU
# adds in no fixed order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str  # the guarantee
    ok: bool
    detail: str  # what was compared, and the numbers


@dataclass(frozen=True)
class Difference:
    """A tensor that is not equal on all ranks."""

    name: str
    ranks: tuple[int, ...]  # ranks whose tensor differs from rank 0's
    what: str  # the largest difference, or the shapes

    def __str__(self) -> str:
        """Return the tensor's name, its ranks and what differs."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{self.name} on {ranks} is not rank 0's ({self.what})"


def differences(tensors: Mapping[str, Tensor | None]) -> list[Difference]:
    """Return the tensors that differ between ranks in any bit. Collective: every rank must call.

    Args:
        tensors: by name; a tensor that is None or missing on only some ranks differs, too.
    """
    own = {name: _fingerprint(tensor) for name, tensor in tensors.items() if tensor is not None}
    by_rank = gather_objects(own)
    result = []
    for name in dict.fromkeys(name for prints in by_rank for name in prints):
        prints = [of_rank.get(name) for of_rank in by_rank]
        ranks = tuple(rank for rank, mark in enumerate(prints) if mark != prints[0])
        if not ranks:
            continue
        shapes = [None if mark is None else mark[:2] for mark in prints]
        if any(shape != shapes[0] for shape in shapes):
            shown = ("none" if shape is None else f"{shape[0]} of {shape[1]}" for shape in shapes)
            what = f"by rank: {'; '.join(shown)}"
        else:
            tensor = tensors[name]
            assert tensor is not None
            what = f"largest difference {largest_difference(tensor):.3g}"
        result.append(Difference(name, ranks, what))
    return result


def largest_difference(tensor: Tensor) -> float:
    """Return how far an element differs between ranks at most. Collective: every rank."""
    lowest = tensor.detach().to(dtype=torch.float64, copy=True).contiguous()
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return float((highest - lowest).max()) if lowest.numel() else 0.0


def format_differences(differing: Sequence[Difference]) -> str:
    """Return the differences as a phrase; empty if there are none."""
    return listed([str(difference) for difference in differing], separator="; ")


def tolerance(state: TrainState, dtype: torch.dtype) -> float:
    """Return the tolerance for a tensor's dtype, or for autocast's if that is on."""
    precision = state.setup.config.train.precision
    return TOLERANCES.get(dtype if precision == "fp32" else DTYPES[precision], 2e-2)


def registered_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, including those that are not saved."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def unregistered_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and numbers that are plain attributes of a model's modules.

    They are in no state_dict, and no mode sends them to other ranks.
    """
    values = {}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, float | int | Tensor):
                name = f"{prefix}.{key}".lstrip(".") + ", a plain attribute,"
                values[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return values


def _fingerprint(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    """Return the tensor's shape, dtype and digest."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(raw.data, digest_size=16).hexdigest()
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest
