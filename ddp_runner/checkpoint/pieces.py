"""The tensors of a state by name, each rank with its pieces: the content of a sharded checkpoint.

The state itself goes into ``state.pt``. Where it has a tensor without values, on the meta device,
the values are in the files of the ranks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.manifest import FileFacts
from ddp_runner.checkpoint.tensor_files import (
    DTYPES,
    OFFSETS,
    SavedTensor,
    parts_in,
    write_tensors,
)
from ddp_runner.errors import UserError
from ddp_runner.files import leaves
from ddp_runner.parallelism.shards import is_shard, map_leaves, own_part, spec_of


@dataclass(frozen=True)
class Piece:
    """A tensor of a state, and the part of it that this rank saves."""

    spec: Tensor  # the whole tensor's dtype and shape, on the meta device
    offsets: tuple[int, ...] = ()  # of the part in the whole tensor
    part: Tensor | None = None  # None: other ranks save all of it


def pieces_of(state: Any, holders: Mapping[str, int], *, rank: int) -> Any:
    """Return a state with pieces in place of its tensors; sparse tensors and odd dtypes stay.

    Args:
        state: tensors, and dicts and lists of them.
        holders: the first rank that has a tensor, by the tensor's name, unless it is 0.
        rank: this rank.
    """
    places = dict[object, tuple[tuple[int, ...], frozenset[int]]]()  # the loop waits meanwhile

    def piece(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in DTYPES or value.is_sparse:
            return value
        spec, holder = spec_of(value), holders.get(name, 0)
        if not is_shard(value):
            return Piece(spec, (0,) * value.ndim, value if rank == holder else None)
        place = value.device_mesh, value.placements, value.shape
        if place not in places:
            places[place] = _place(value)
        offsets, copies = places[place]
        part = own_part(value)
        is_saved = holder in copies and part.numel() > 0  # a rank may have no rows
        return Piece(spec, offsets, part if is_saved else None)

    return map_leaves(piece, state)


def _place(tensor: Any) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the offsets of this rank's part, and the ranks of its mesh if it is the first copy."""
    mesh, (chunk,) = tensor.device_mesh, tensor.__create_chunk_list__()
    axes = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    is_first = not any(placement.is_replicate() and index for index, placement in axes)
    return tuple(chunk.offsets), frozenset(mesh.mesh.flatten().tolist() if is_first else ())


def split_off(state: Any) -> tuple[Any, dict[str, Piece]]:
    """Return a state with specs in place of its pieces, and the pieces by name.

    Raises:
        TypeError: two tensors have the same name.
    """
    pieces = dict[str, Piece]()

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, Piece):
            return value
        if pieces.setdefault(name, value) is not value:
            raise TypeError(f"the state has two tensors with the name {name}")
        return value.spec

    return map_leaves(spec, state), pieces


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> FileFacts | None:
    """Write this rank's parts, and return the file's facts; None if it has no part."""
    parts = {name: piece.part for name, piece in pieces.items() if piece.part is not None}
    if not parts:
        return None
    offsets = {name: {"saved_offsets": [*pieces[name].offsets]} for name in parts}
    return write_tensors(path, parts, parts.values(), facts={OFFSETS: json.dumps(offsets)})


def joined(state: Any, files: Iterable[Path]) -> Any:
    """Return a state with saved tensors in place of its specs; only what is used is read."""
    parts = parts_in(files)

    def saved(name: str, value: Any) -> Any:
        is_spec = isinstance(value, Tensor) and value.is_meta
        return SavedTensor(name, value, parts.get(name, [])) if is_spec else value

    return map_leaves(saved, state)


def reject_sharded(state: Any, name: str = "the state") -> None:
    """Reject sharded tensors: rank 0 would save only its own part.

    Raises:
        UserError: the state holds a sharded tensor; the message has its key.
    """
    for key, value in leaves(state, name):
        # Recognise DTensor, ShardedTensor, … by module: importing the classes takes time.
        kinds = type(value).__mro__ if isinstance(value, Tensor) else ()
        if any(kind.__module__.startswith("torch.distributed") for kind in kinds):
            raise UserError(
                f"{key} is a {type(value).__name__}, so each rank has only a part of it, but a "
                "checkpoint holds whole tensors",
                "train under parallelism=ddp, or return whole tensors from the model's "
                "state_dict()",
            )
