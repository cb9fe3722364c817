"""Sharded tensors: gathered to be saved, split again when loaded.

A stage of a pipeline is sharded by name: it has the attribute ``whole_state``, the whole model's
state_dict without values.

They are torch's DTensors. Importing that class takes half a second, so the method ``full_tensor``
identifies them, and a run without shards does not import it.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_runner.device import values_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Part = tuple[Sequence[int], Tensor]  # offsets in the whole tensor, values


class StoredTensor:
    """A whole tensor that is not in memory; a rank reads the part that it needs.

    The parts are mapped from files, so that only what is used is read.
    """

    def __init__(self, name: str, spec: Tensor, parts: Sequence[Part]) -> None:
        self._name, self.shape, self._dtype, self._parts = name, spec.shape, spec.dtype, parts

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the values from `offsets` on, on the CPU; do not change them.

        Raises:
            UserError: the files lack some.
        """
        target, filled = torch.empty(tuple(sizes), dtype=self._dtype), 0
        for begin, part in self._parts:
            ends = zip(offsets, sizes, begin, part.shape, strict=True)
            last = [min(a + n, b + m) for a, n, b, m in ends]
            first = [min(z, max(a, b)) for a, b, z in zip(offsets, begin, last, strict=True)]
            box = target[_slices(first, last, offsets)]
            box.copy_(part[_slices(first, last, begin)])
            filled += box.numel()
        if filled != target.numel():
            raise UserError(
                f"{self._name} is incomplete: its files have {filled} of {target.numel()} values"
            )
        return target


def _slices(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> Any:
    """Return a box of the whole tensor in the part that begins at `origin`."""
    bounds = zip(first, last, origin, strict=True)
    return tuple(slice(low - start, high - start) for low, high, start in bounds)


def whole(value: Tensor | StoredTensor) -> Tensor:
    """Return a tensor, whole and in memory."""
    if isinstance(value, Tensor):
        return value
    return value.read([0] * len(value.shape), value.shape)


def map_leaves(change: Callable[[str, Any], Any], state: Any, path: str = "") -> Any:
    """Return a state with ``change(path, value)`` in place of each value that is not nested.

    Nested are mappings, lists and tuples, but no subclasses of the latter two. A path is the keys
    from the outermost on, as in ``a.0.b``.
    """
    prefix = f"{path}." if path else ""
    if isinstance(state, Mapping):
        result: Any = copy.copy(state)  # a module's state_dict carries `_metadata`
        for key, value in state.items():
            result[key] = map_leaves(change, value, f"{prefix}{key}")
        return result
    if type(state) not in (list, tuple):
        return change(path, state)
    items = enumerate(state)
    return type(state)(map_leaves(change, value, f"{prefix}{number}") for number, value in items)


def spec_of(tensor: Tensor, device: str | torch.device = "meta") -> Tensor:
    """Return a contiguous tensor of the same dtype and shape, by default without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


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


def shard_like(value: Any, reference: Any) -> Any:
    """Return a whole or stored tensor split as the reference is; anything else unchanged."""
    if not is_shard(reference):
        return whole(value) if isinstance(value, StoredTensor) else value
    if is_shard(value) or not isinstance(value, Tensor | StoredTensor):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = reference.device_mesh, reference.placements
    if isinstance(value, StoredTensor):
        (chunk,) = cast(Any, reference).__create_chunk_list__()
        part = value.read(chunk.offsets, chunk.sizes).to(own_part(reference).device)
        sizes: dict[str, Any] = {"shape": reference.shape, "stride": reference.stride()}
        return DTensor.from_local(part, mesh, placements, run_check=False, **sizes)
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)


@torch.no_grad()
def copy_shard(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, or this rank's part of it, into the target."""
    own_part(target).copy_(own_part(shard_like(value, target)))


def has_stages(module: nn.Module) -> bool:
    """Return whether a module is, or holds, stages of a pipeline."""
    return any(hasattr(part, "whole_state") for part in module.modules())


def whole_state(module: nn.Module) -> Mapping[str, Tensor]:
    """Return a bare model's state_dict; of stages the whole model's, without values."""
    state: Mapping[str, Tensor] = module.state_dict()
    for name, part in module.named_modules():
        if hasattr(part, "whole_state"):
            prefix = f"{name}." if name else ""
            whole = cast(Mapping[str, Tensor], part.whole_state)
            others = {key: value for key, value in state.items() if not key.startswith(prefix)}
            return {**others, **{prefix + key: value for key, value in whole.items()}}
    return state


def send_module(
    module: nn.Module,
    tensors: Mapping[str, Tensor | StoredTensor] | None,
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """Load rank 0's tensors on all ranks, one at a time. Collective: every rank must call.

    The module is a bare model, or a rank's stage of one. The tensors are the model's state_dict
    with whole tensors on rank 0, None on the others. `group` has the module; None: all ranks.
    """
    own = module.state_dict()
    device = next(iter(own.values())).device
    for key, spec in whole_state(module).items():
        value = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        if tensors is not None:
            value.copy_(whole(tensors[key]))
        dist.broadcast(value, src=0, group=group)
        if key in own:
            copy_shard(own[key], value)


def whole_tensors(module: nn.Module, *, group: dist.ProcessGroup | None = None) -> Iterator[Tensor]:
    """Yield the tensors of ``whole_state``, one by one; on rank 0 each is whole.

    Collective if the model is split: every rank must then iterate to the end.
    """
    own = module.state_dict()
    holders = holders_of(own, group=group) if has_stages(module) else {}
    for key, spec in whole_state(module).items():
        yield for_rank_zero(own.get(key, spec), holder=holders.get(key, 0), group=group)


def for_rank_zero(value: Tensor, *, holder: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return a tensor that is right, and whole, on rank 0. Collective: every rank must call.

    The value is whole or split, or on the meta device if this rank lacks it. `holder` is the first
    rank that has it, or a part of it.
    """
    full = full_tensor(value.detach())
    if holder:  # over gloo, on the CPU
        if full.is_meta or holder != dist.get_rank(group):
            full = torch.empty(full.shape, dtype=full.dtype)
        full = full.cpu().contiguous()
        # As bytes: gloo lacks some dtypes.
        dist.broadcast(full.reshape(-1).view(torch.uint8), src=holder, group=group)
    return full


def holders_of(names: Iterable[str], *, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Return the first rank that has each name, given this rank's names. Collective."""
    holders = dict[str, int]()
    for rank, names_there in enumerate(gather_objects([*names], group=group)):
        holders |= {name: rank for name in names_there if name not in holders}
    return holders


def first_not_finite(module: nn.Module) -> str | None:
    """Return the first parameter with a NaN or infinity in this rank's part; None if none has."""
    tensors = {name: own_part(value) for name, value in module.named_parameters()}
    # A sum takes a tenth of the time of a look at each value. It may overflow where all are finite.
    sums = values_of([tensor.sum().abs() for tensor in tensors.values()])
    doubtful = [name for name, total in zip(tensors, sums, strict=True) if not math.isfinite(total)]
    return next((name for name in doubtful if not torch.isfinite(tensors[name]).all()), None)
