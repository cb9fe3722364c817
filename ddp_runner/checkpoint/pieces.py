"""The tensors of a state by name, each rank with its pieces: the content of a sharded checkpoint.

The state itself goes into ``state.pt``. Where it has a tensor without values, on the meta device,
the values are in the files of the ranks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

    def piece(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in DTYPES or value.is_sparse:
            return value
        return _piece(value, holder=holders.get(name, 0), rank=rank)

    return map_leaves(piece, state)


def _piece(tensor: Tensor, *, holder: int, rank: int) -> Piece:
    """Return a tensor's piece: of equal copies, also in other meshes, the first is saved."""
    if not is_shard(tensor):
        return Piece(spec_of(tensor), (0,) * tensor.ndim, tensor if rank == holder else None)
    mesh, part = tensor.device_mesh, own_part(tensor)
    copies = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    is_copy = any(placement.is_replicate() and index for index, placement in copies)
    (chunk,) = cast(Any, tensor).__create_chunk_list__()
    # A rank may have no rows.
    is_saved = holder in _ranks_of(mesh) and not is_copy and part.numel() > 0
    return Piece(spec_of(tensor), tuple(chunk.offsets), part if is_saved else None)


@lru_cache
def _ranks_of(mesh: "DeviceMesh") -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


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
