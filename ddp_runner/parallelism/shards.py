"""Tensors of which a rank holds only a part: put together to be saved, cut again when loaded.

They are torch's DTensors. Importing that class takes half a second, so they are known by their
method ``full_tensor``, and a run without any pays nothing.
"""

import copy
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_runner.device import values_of
from ddp_runner.errors import UserError


def reshard(module: nn.Module) -> None:
    """Free what a forward without a backward has gathered; FSDP2 frees the rest by itself.

    Until then the module's parameters are whole tensors, or shards over fewer ranks.
    """
    for part in module.modules():
        if hasattr(part, "reshard"):
            cast(Any, part).reshard()


def is_shard(value: object) -> bool:
    """Return whether a value is a tensor that is split over ranks."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def has_shards(module: nn.Module) -> bool:
    """Return whether a rank holds only a part of the module."""
    return any(map(is_shard, module.parameters()))


def fit_optimizer(optimizer: Optimizer, keys: Mapping[str, Any], parallelism: object) -> None:
    """Let an optimizer, built of these keys, step parameters of which some may be split over ranks.

    Raises:
        UserError: torch cannot do so.
    """
    named, mode = f"optimizer={keys.get('name')} ({keys['_target_']})", f"parallelism={parallelism}"
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(map(is_shard, parameters)):
        return
    if isinstance(optimizer, torch.optim.Adafactor):
        raise UserError(
            f"{named} takes norms in place, which torch cannot do for parameters that {mode} "
            "splits; write optimizer=adamw, or parallelism=ddp"
        )
    if all(map(is_shard, parameters)):
        return
    for key in ("foreach", "fused"):
        if any(group.get(key) for group in optimizer.param_groups):
            raise UserError(
                f"optimizer.{key}=true steps all parameters in one call, which torch cannot do "
                f"under {mode}, where some are split and some are not; leave it out"
            )
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None:  # torch's own choice, which on a GPU is true
            group["foreach"] = False


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of it if it is not split."""
    return cast(Any, tensor).to_local() if is_shard(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective if it is split."""
    return cast(Any, tensor).full_tensor() if is_shard(tensor) else tensor


def laid_out_as(value: Tensor, own: Tensor) -> Tensor:
    """Return a tensor split as a rank's own one is. Collective if it is split otherwise."""
    if not is_shard(own):
        return value
    return cast(Tensor, cast(Any, value).redistribute(placements=cast(Any, own).placements))


def gathered(state: Any, *, keep: bool, copies: set[int] | None = None) -> Any:
    """Return a state with whole tensors, on the CPU, in place of shards. Collective if it has any.

    One tensor at a time is put together.

    Args:
        state: tensors, and dicts and lists of them; what is not split is returned as it is.
        keep: whether this rank needs the result; else its whole tensors are None.
        copies: takes the address of the memory of each whole tensor: nothing else uses it.
    """
    if isinstance(state, Mapping):
        parts = {key: gathered(value, keep=keep, copies=copies) for key, value in state.items()}
        if all(parts[key] is state[key] for key in parts):
            return state
        # Of the same kind, a dict: that of a module has its version beside the keys.
        result: Any = copy.copy(state)
        result.update(parts)
        return result
    if isinstance(state, list | tuple):
        items = [gathered(value, keep=keep, copies=copies) for value in state]
        return state if all(map(is_, items, state)) else items
    if not is_shard(state):
        return state
    full = whole(state.detach())
    if not keep:
        return None
    full, source = full.cpu(), own_part(state).untyped_storage()
    # The whole of a tensor on one rank is the rank's own part, which the next step changes.
    if copies is not None and (address := full.untyped_storage().data_ptr()) != source.data_ptr():
        copies.add(address)
    return full


def like(value: Tensor, own: Tensor) -> Tensor:
    """Return a whole tensor split as a rank's own one is; as it is if that is not split."""
    if not is_shard(own) or is_shard(value):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    local = value.to(own.device_mesh.device_type)
    return distribute_tensor(local, own.device_mesh, own.placements, src_data_rank=None)


def copy_shard(own: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, or this rank's part of it, into the rank's own one."""
    with torch.no_grad():
        own_part(own).copy_(own_part(like(value, own)))


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state_dict with whole tensors, which every rank has, into a module or its shards."""
    expected = module.state_dict() if has_shards(module) else {}
    found = {
        key: like(value, expected[key]) if key in expected else value
        for key, value in state.items()
    }
    module.load_state_dict(found if expected else state)


def send_module(
    module: nn.Module, tensors: Mapping[str, Tensor] | None, *, group: dist.ProcessGroup | None
) -> None:
    """Load rank 0's tensors on all ranks, one at a time. Collective: every rank must call.

    Args:
        module: bare, of the same model on every rank.
        tensors: on rank 0 its state_dict with whole tensors; None on the others.
        group: the ranks that have the module; None: all.
    """
    for key, own in module.state_dict().items():
        value = torch.empty(own.shape, dtype=own.dtype, device=own_part(own).device)
        if tensors is not None:
            value.copy_(tensors[key])
        dist.broadcast(value, src=0, group=group)
        copy_shard(own, value)


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that is NaN or infinite somewhere; None: all are finite.

    Every rank gets the same answer. Collective if a tensor is split.
    """
    tensors = dict(named)
    flags = [(~torch.isfinite(own_part(one))).any() for one in tensors.values()]
    counts = list(map(int, values_of(flags)))
    if any(map(is_shard, tensors.values())):
        total = torch.tensor(counts)
        dist.all_reduce(total)
        counts = total.tolist()
    return next((name for name, count in zip(tensors, counts, strict=True) if count), None)
