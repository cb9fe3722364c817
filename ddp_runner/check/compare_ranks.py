"""What a check finds, and how tensors are compared over ranks: by their digests.

Where these differ, minimum and maximum over ranks tell how far. No tensor is gathered, so a large
model costs no more memory than it has. Used by ``check``.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.distributed import gather_objects
from ddp_runner.train.loop import DTYPES
from ddp_runner.train.state import TrainState

MOST_NAMES = 3  # of differing tensors that are told
# How far apart results may be that are equal but for rounding, in parts of the largest: a GPU adds
# in no fixed order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Finding:
    """What one check has shown."""

    name: str  # what is guaranteed
    ok: bool
    detail: str  # what was compared, and the numbers


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on all ranks."""

    name: str
    ranks: tuple[int, ...]  # whose tensor is another than rank 0's
    what: str  # how far apart, or which shapes

    def __str__(self) -> str:
        """Name it with its ranks."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{self.name} on {ranks} is not rank 0's ({self.what})"


def differences(tensors: Mapping[str, Tensor | None]) -> list[Difference]:
    """Return which tensors are not equal on all ranks, bit for bit. Collective: every rank.

    Args:
        tensors: by name; a name that is None or missing on some ranks only differs, too.
    """
    own = {name: _facts(tensor) for name, tensor in tensors.items() if tensor is not None}
    by_rank = gather_objects(own)
    found = []
    for name in dict.fromkeys(name for facts in by_rank for name in facts):
        facts = [one.get(name) for one in by_rank]
        ranks = tuple(rank for rank, one in enumerate(facts) if one != facts[0])
        if not ranks:
            continue
        shapes = [None if one is None else one[:2] for one in facts]
        if any(shape != shapes[0] for shape in shapes):
            shown = ("none" if one is None else f"{one[0]} of {one[1]}" for one in shapes)
            what = f"by rank: {'; '.join(shown)}"
        else:
            tensor = tensors[name]
            assert tensor is not None
            what = f"largest difference {spread(tensor):.3g}"
        found.append(Difference(name, ranks, what))
    return found


def spread(tensor: Tensor) -> float:
    """Return the largest difference of an element between any two ranks. Collective: every rank."""
    lowest = tensor.detach().to(dtype=torch.float64, copy=True).contiguous()
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return float((highest - lowest).max()) if lowest.numel() else 0.0


def told(found: Sequence[Difference]) -> str:
    """Return the differences as one phrase."""
    return listed([str(one) for one in found], separator="; ")


def listed(names: Sequence[str], *, separator: str = ", ") -> str:
    """Return the first few names, and how many more there are."""
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return separator.join([*names[:MOST_NAMES], *more])


def tolerance(state: TrainState, dtype: torch.dtype) -> float:
    """Return the tolerance for a parameter's or output's dtype, or for that of autocast."""
    precision = state.setup.config.precision
    return TOLERANCES.get(dtype if precision == "fp32" else DTYPES[precision], 2e-2)


def registered(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, also those that are not saved."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def plain_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and numbers that a model keeps as attributes of its modules.

    No state_dict has them and no mode sends them.
    """
    found = {}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, float | int | Tensor):
                name = f"{prefix}.{key}".lstrip(".") + ", an attribute and no buffer,"
                found[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return found


def _facts(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    """Return shape, dtype and digest."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(raw.data, digest_size=16).hexdigest()
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest
