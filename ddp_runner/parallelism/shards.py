"""Sharded tensors: gathered to be saved, split again when loaded.

They are torch's DTensors. Importing that class takes half a second, so the method ``full_tensor``
identifies them, and a run without shards does not import it.
"""

import copy
from collections.abc import Iterable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_runner.device import values_of
from ddp_runner.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def reshard(module: nn.Module) -> None:
    """Free parameters that a forward without a backward has left gathered under FSDP2."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            cast(Any, part).reshard()


def is_shard(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a sharded tensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def has_shards(module: nn.Module) -> bool:
    """Return whether a rank holds only a part of a parameter."""
    return any(map(is_shard, module.parameters()))


def fit_optimizer(optimizer: Optimizer, keys: Mapping[str, Any], parallelism: str) -> None:
    """Let an optimizer, built from `keys`, step parameters that may be sharded.

    Raises:
        UserError: torch does not support it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_shard, parameters)):
        return
    if isinstance(optimizer, torch.optim.Adafactor):
        raise UserError(
            f"optimizer={keys.get('name')} ({keys['_target_']}) takes norms in place, which torch "
            f"cannot do for parameters that parallelism={parallelism} splits",
            "write optimizer=adamw, or parallelism=ddp",
        )
    if all(map(is_shard, parameters)):
        return
    for key in ("foreach", "fused"):
        if any(group.get(key) for group in optimizer.param_groups):
            raise UserError(
                f"optimizer.{key}=true steps all parameters in one call, which torch cannot do "
                f"under parallelism={parallelism}, which splits only some",
                "leave it out",
            )
    step_one_by_one(optimizer)


def step_one_by_one(optimizer: Optimizer) -> None:
    """Step each parameter in calls of its own, unless a key asks for ``foreach``.

    Torch's default on a GPU is one call for all, but not for sharded parameters. NAdam, RAdam and
    ASGD round differently in the two.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None:
            group["foreach"] = False


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not split."""
    return tensor.to_local() if is_shard(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective if it is split."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def redistribute_like(value: Tensor, reference: Tensor) -> Tensor:
    """Return a tensor split as the reference is. Collective if its layout changes."""
    if is_shard(reference) and is_shard(value):
        return value.redistribute(placements=reference.placements)
    return value


def gathered(state: Any, *, keep: bool, copies: set[int] | None = None) -> Any:
    """Return a state with whole tensors on the CPU in place of shards. Collective if it has shards.

    Args:
        state: tensors, and dicts and lists of them; tensors that are not split stay.
        keep: whether this rank needs the result; else its whole tensors are None.
        copies: gets the memory address of each whole tensor that nothing else uses.
    """
    if isinstance(state, Mapping):
        parts = {key: gathered(value, keep=keep, copies=copies) for key, value in state.items()}
        if all(parts[key] is state[key] for key in parts):
            return state
        result: Any = copy.copy(state)  # a module's state_dict carries `_metadata`
        result.update(parts)
        return result
    if isinstance(state, list | tuple):
        items = [gathered(value, keep=keep, copies=copies) for value in state]
        return state if all(map(is_, items, state)) else items
    if not is_shard(state):
        return state
    full = full_tensor(state.detach())
    if not keep:
        return None
    full, source = full.cpu(), own_part(state).untyped_storage()
    # With a single rank the whole tensor is the rank's part, which the next step changes.
    if copies is not None and (address := full.untyped_storage().data_ptr()) != source.data_ptr():
        copies.add(address)
    return full


def shard_like(value: Tensor, reference: Tensor) -> Tensor:
    """Return a whole tensor split as the reference is."""
    if is_shard(value) or not is_shard(reference):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = reference.device_mesh, reference.placements
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)


@torch.no_grad()
def copy_shard(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, or this rank's part of it, into the target."""
    own_part(target).copy_(own_part(shard_like(value, target)))


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state_dict with whole tensors, which every rank has, into a module or its shards."""
    if has_shards(module):
        shards = module.state_dict()
        state = {
            key: shard_like(value, shards[key]) if key in shards else value
            for key, value in state.items()
        }
    module.load_state_dict(state)


def send_module(
    module: nn.Module, tensors: Mapping[str, Tensor] | None, *, group: dist.ProcessGroup | None
) -> None:
    """Load rank 0's tensors on all ranks, one at a time. Collective: every rank must call.

    Args:
        module: the unwrapped module, the same on every rank.
        tensors: on rank 0 its state_dict with whole tensors; None on other ranks.
        group: the ranks that have the module; None: all.
    """
    for key, target in module.state_dict().items():
        value = torch.empty(target.shape, dtype=target.dtype, device=own_part(target).device)
        if tensors is not None:
            value.copy_(tensors[key])
        dist.broadcast(value, src=0, group=group)
        copy_shard(target, value)


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or infinity, the same on every rank, or None.

    Collective if a tensor is split.
    """
    tensors = dict(named)
    flags = [(~torch.isfinite(own_part(tensor))).any() for tensor in tensors.values()]
    counts = list(map(int, values_of(flags)))
    if any(map(is_shard, tensors.values())):
        total = torch.tensor(counts)
        dist.all_reduce(total)
        counts = total.tolist()
    return next((name for name, count in zip(tensors, counts, strict=True) if count), None)
