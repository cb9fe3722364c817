"""Compares states between ranks, and sends checkpoints to machines without the run folder."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from ddp_runner.checkpoint.store import first_undamaged, newest_first
from ddp_runner.checkpoint.tensor_files import raw_bytes
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError
from ddp_runner.parallelism.shards import whole_state, whole_tensors

CHUNK_BYTES = 64 * 2**20  # bytes per broadcast


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
    for name, tensor in zip(whole_state(module), whole_tensors(module), strict=True):
        for leaf in _leaves({name: tensor}) if dist.get_rank() == 0 else ():
            digest.update(leaf)
    return digest.hexdigest()


def _leaves(state: Any) -> Iterator[bytes | memoryview]:
    """Yield what a digest is of; checkpoints hold digests, so it stays as it is."""
    if isinstance(state, Tensor):
        yield f"{tuple(state.shape)} {state.dtype}".encode()
        yield raw_bytes(state)
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


def agreed_checkpoint(folder: Path, *, log: Callable[[str], None]) -> Path | None:
    """Return the newest undamaged checkpoint that rank 0 sees; None without checkpoints.

    Ranks that see it verify different files. Rank 0 logs each checkpoint that is skipped.
    Collective: every rank must call.

    Raises:
        UserError: every checkpoint is damaged, or the folder cannot be read.
    """
    say = log if dist.get_rank() == 0 else lambda _: None
    paths = from_rank_zero(partial(newest_first, folder))
    path = first_undamaged(paths, log=say, check=_verify_together)
    if paths and path is None:
        raise UserError(
            f"nothing is left to resume from: every checkpoint in {folder} is damaged "
            f"({len(paths)} of {len(paths)})",
            "restore a copy of a checkpoint, or start a new run",
        )
    return path


def _verify_together(path: Path) -> Manifest:
    """Return the manifest of rank 0's checkpoint; the ranks that see it each verify some files.

    Raises:
        UserError: on every rank, if a file is damaged.
    """
    manifest, content = from_rank_zero(
        lambda: (read_manifest(path), (path / MANIFEST).read_bytes())
    )
    flags, rank = gather_objects(_is_here(path, content)), dist.get_rank()
    flags[0] = True  # it says which file is missing
    verifiers = [number for number, is_here in enumerate(flags) if is_here]
    damage: UserError | None = None
    if rank in verifiers:
        try:
            verify(path, verifier=verifiers.index(rank), num_verifiers=len(verifiers))
        except UserError as error:
            damage = error
    for found in filter(None, gather_objects(damage)):
        raise found
    return manifest


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
        for name in from_rank_zero(lambda: [*read_manifest(path).files]):
            _send(path / name, folder / name if receives else None)
        if receives:
            (folder / MANIFEST).write_bytes(manifest)
            verify(folder)
        gather_objects(None)  # wait until all copies are complete
        yield folder
        gather_objects(None)  # wait until all ranks have loaded
    finally:
        if copy is not None:
            shutil.rmtree(copy)


def _is_here(path: Path, manifest: bytes) -> bool:
    """Return whether this machine has the checkpoint; its manifest holds the files' checksums."""
    file = path / MANIFEST
    if not file.is_file() or file.read_bytes() != manifest:
        return False
    return all((path / name).is_file() for name in read_manifest(path).files)


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
