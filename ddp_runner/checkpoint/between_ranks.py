"""Compares states between ranks, and sends checkpoints to machines without the run folder."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import MANIFEST, STATE
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.parallelism.shards import full_tensor

CHUNK_BYTES = 64 * 2**20  # bytes per broadcast


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
    """Return a digest of plain data and tensors; equal states have equal digests."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(state):
        digest.update(leaf)
    return digest.hexdigest()


def weights_sha256(module: nn.Module) -> str:
    """Return the SHA-256 of a bare model's weights with their names, shapes and dtypes.

    The same on every number of ranks. Collective if the model is split; use rank 0's result.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        whole = full_tensor(tensor)  # one at a time, for little memory
        for leaf in _leaves({name: whole}) if dist.get_rank() == 0 else ():
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


@contextmanager
def on_every_machine(path: Path) -> Iterator[Path]:
    """Yield the folder of rank 0's checkpoint, or a local copy. Collective: every rank must call.

    A machine without the checkpoint gets a copy in its temporary folder for the block.
    """
    manifest = from_rank_zero((path / MANIFEST).read_bytes)
    is_here = _is_here(path, manifest)
    if all(gather_objects(is_here)):
        yield path
        return
    copy = None if is_here else Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
    try:
        # The ranks of a machine share the first copy whose folder they see: containers may share
        # a host name without sharing a file system.
        copies = [folder for folder in gather_objects(copy) if folder is not None]
        folder = path if copy is None else next(folder for folder in copies if folder.is_dir())
        receives = folder == copy
        _send(path / STATE, folder / STATE if receives else None)
        if receives:
            (folder / MANIFEST).write_bytes(manifest)
        gather_objects(None)  # wait until all copies are complete
        yield folder
        gather_objects(None)  # wait until all ranks have loaded
    finally:
        if copy is not None:
            shutil.rmtree(copy)


def _is_here(path: Path, manifest: bytes) -> bool:
    """Return whether this machine has the checkpoint; its manifest holds the state's checksum."""
    files = [path / MANIFEST, path / STATE]
    return all(file.is_file() for file in files) and files[0].read_bytes() == manifest


def _send(source: Path, target: Path | None) -> None:
    """Write rank 0's file to `target` unless it is None. Collective: every rank must call."""
    is_rank_zero = dist.get_rank() == 0
    size = from_rank_zero(lambda: source.stat().st_size)
    devnull = Path(os.devnull)
    with (
        (source if is_rank_zero else devnull).open("rb") as reader,
        (target or devnull).open("wb") as writer,
    ):
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if is_rank_zero:
                reader.readinto(chunk.numpy().data)
            dist.broadcast(chunk, src=0)
            writer.write(chunk.numpy().data)
