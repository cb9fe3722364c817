"""A state of objects whose tensors are whole, split over ranks, or on other ranks' stages.

On a rank that lacks a tensor it is a spec: a tensor without values, on the meta device. A
checkpoint has the whole tensors, on rank 0, or specs and, in files of their own, each rank's parts.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_runner.checkpoint.tensor_files import DTYPES, parts_in
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.files import leaves
from ddp_runner.parallelism.shards import (
    Part,
    StoredTensor,
    for_rank_zero,
    holders_of,
    is_shard,
    map_leaves,
    own_part,
    spec_of,
)


def of_all_stages(state: Any, *, group: dist.ProcessGroup | None) -> tuple[Any, dict[str, int]]:
    """Return the states of all stages as one, with this rank's tensors and specs of the others.

    The second value is the first rank that has a tensor, by its name. Collective.
    """
    own = dict[str, Tensor]()

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own[name] = value
        return spec_of(value)

    states = gather_objects(map_leaves(spec, state), group=group)
    return map_leaves(own.get, _merged(states)), holders_of(own, group=group)


def _merged(trees: Sequence[Any]) -> Any:
    """Return nested states with the keys, and the items of lists of names, of all of them."""
    first = trees[0]
    if isinstance(first, Mapping):
        result: Any = copy.copy(first)  # a module's state_dict carries `_metadata`
        for key in dict.fromkeys(key for tree in trees for key in tree):
            result[key] = _merged([tree[key] for tree in trees if key in tree])
        return result
    if not isinstance(first, list | tuple):
        return first
    if all(isinstance(name, str) for tree in trees for name in tree):
        return [*dict.fromkeys(name for tree in trees for name in tree)]
    if len({*map(len, trees)}) > 1:
        fix = "make lists of one length on every rank, or write parallelism=fsdp"
        raise UserError("the ranks of a pipeline have lists of several lengths in a state", fix)
    return type(first)(map(_merged, zip(*trees, strict=True)))


def gathered(
    state: Any,
    holders: Mapping[str, int],
    *,
    keep: bool,
    copies: set[int],
    group: dist.ProcessGroup | None,
) -> Any:
    """Return a state with whole tensors, on the CPU, in place of split and absent ones.

    Tensors that rank 0 has already stay. Collective if there are others. For `holders` see
    ``of_all_stages``; a tensor without an entry is on every rank. Unless `keep` is set, the whole
    tensors are None. `copies` gets the memory address of each that nothing else uses.
    """

    def whole(name: str, value: Any) -> Any:
        holder = holders.get(name, 0)
        if not isinstance(value, Tensor) or not (holder or is_shard(value)):
            return value
        full = for_rank_zero(value, holder=holder, group=group)
        if not keep:
            return None
        full, source = full.cpu(), own_part(value).untyped_storage()
        # With a single rank the whole tensor is the rank's part, which the next step changes.
        if (address := full.untyped_storage().data_ptr()) != source.data_ptr():
            copies.add(address)
        return full

    return map_leaves(whole, state)


def split_off(state: Any, holders: Mapping[str, int], *, rank: int) -> tuple[Any, dict[str, Part]]:
    """Return a state with specs in place of its tensors, and the parts that this rank saves.

    Each value of a tensor is in one rank's parts. Sparse tensors and odd dtypes stay in the state.
    For `holders` see ``gathered``.

    Raises:
        TypeError: two tensors have the same name.
    """
    names, parts = set[str](), dict[str, Part]()
    places = dict[object, tuple[tuple[int, ...], frozenset[int]]]()  # the loop waits meanwhile

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype not in DTYPES or value.is_sparse:
            if name in holders and holders[name] > 0:  # only rank 0 saves the state
                raise UserError(
                    f"{name} is {value.dtype}, {value.layout}, which a rank of a pipeline cannot "
                    "save in a file of its own",
                    "write checkpoint.format=file",
                )
            return value
        if name in names:
            raise TypeError(f"the state has two tensors with the name {name}")
        names.add(name)
        if is_shard(value) and any(place.is_partial() for place in value.placements):
            from torch.distributed.tensor import Replicate  # each rank has a summand: add them

            placements = [Replicate() if p.is_partial() else p for p in value.placements]
            value = value.redistribute(placements=placements)
        holder, part = holders.get(name, 0), own_part(value)
        if not is_shard(value):
            if rank == holder:
                parts[name] = (0,) * value.ndim, part
            return spec_of(value)
        place = value.device_mesh, value.placements, value.shape
        if place not in places:
            places[place] = _place(value)
        offsets, savers = places[place]
        if holder in savers and part.numel():  # a rank may have no rows
            parts[name] = offsets, part
        return spec_of(value)

    return map_leaves(spec, state), parts


def _place(tensor: Any) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the offsets of this rank's part, and the ranks of its mesh if it is the first copy."""
    mesh, (chunk,) = tensor.device_mesh, tensor.__create_chunk_list__()
    axes = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    is_first = not any(placement.is_replicate() and index for index, placement in axes)
    return tuple(chunk.offsets), frozenset(mesh.mesh.flatten().tolist() if is_first else ())


def joined(state: Any, files: Iterable[Path]) -> Any:
    """Return a state with stored tensors in place of its specs; only what is used is read."""
    parts = parts_in(files)

    def stored(name: str, value: Any) -> Any:
        is_spec = isinstance(value, Tensor) and value.is_meta
        return StoredTensor(name, value, parts.get(name, [])) if is_spec else value

    return map_leaves(stored, state)


def reject_sharded(state: Any) -> None:
    """Reject sharded tensors: rank 0 would save only its own part.

    Raises:
        UserError: the state holds a sharded tensor; the message has its key.
    """
    for key, value in leaves(state, "the state"):
        # Recognise DTensor, ShardedTensor, … by module: importing the classes takes time.
        kinds = type(value).__mro__ if isinstance(value, Tensor) else ()
        if any(kind.__module__.startswith("torch.distributed") for kind in kinds):
            raise UserError(
                f"{key} is a {type(value).__name__}, so each rank has only a part of it, but a "
                "checkpoint holds whole tensors",
                "train under parallelism=ddp, or return whole tensors from the model's "
                "state_dict()",
            )
