"""Compares states between ranks by digest; sends checkpoints to machines without the folder."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.checkpoint.manifest import MANIFEST, STATE
from ddp_runner.distributed import from_rank_zero, gather_objects


def on_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(on_cpu, state))
    return state


def digest_of(state: Any) -> str:
    """Return a digest of plain data and tensors; equal states have equal ones."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(state):
        digest.update(leaf)
    return digest.hexdigest()


def _leaves(state: Any) -> Iterator[bytes | memoryview]:
    if isinstance(state, Tensor):
        dense = state.detach().to_dense().cpu().contiguous()
        yield f"{tuple(dense.shape)} {dense.dtype}".encode()
        yield dense.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield repr(key).encode()
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        yield str(len(state)).encode()
        for value in state:
            yield from _leaves(value)
    else:
        yield repr(state).encode()


CHUNK_BYTES = 64 * 2**20  # sent at a time


@contextmanager
def on_every_machine(path: Path) -> Iterator[Path]:
    """Give the checkpoint's folder, or this machine's copy of it. Collective: every rank.

    The copy is in the temporary folder until the end of the block.

    Args:
        path: of a checkpoint that rank 0 has.
    """
    manifest = from_rank_zero((path / MANIFEST).read_bytes)
    is_here = _is_here(path, manifest)
    if all(gather_objects(is_here)):
        yield path
        return
    own = None if is_here else Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
    try:
        # Ranks of one machine see each other's folders: they use the first. Host names would not
        # tell, for containers may have one.
        folders = [one for one in gather_objects(own) if one is not None]
        found = path if own is None else next(one for one in folders if one.is_dir())
        receives = found == own
        _send(path / STATE, found / STATE if receives else None)
        if receives:
            (found / MANIFEST).write_bytes(manifest)
        gather_objects(None)  # the copies are complete
        yield found
        gather_objects(None)  # all have loaded it
    finally:
        if own is not None:
            shutil.rmtree(own)


def _is_here(path: Path, manifest: bytes) -> bool:
    """Return whether this machine has the checkpoint; the manifest holds the state's checksum."""
    with suppress(OSError):
        return (path / MANIFEST).read_bytes() == manifest and (path / STATE).is_file()
    return False


def _send(source: Path, target: Path | None) -> None:
    """Write rank 0's file to `target` on the ranks that name one. Collective: every rank."""
    is_rank_zero = dist.get_rank() == 0
    size = from_rank_zero(lambda: source.stat().st_size)
    nowhere = Path(os.devnull)
    with (
        (source if is_rank_zero else nowhere).open("rb") as reader,
        (target or nowhere).open("wb") as writer,
    ):
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if is_rank_zero:
                reader.readinto(chunk.numpy().data)
            dist.broadcast(chunk, src=0)
            writer.write(chunk.numpy().data)
