"""Brings small files of all ranks to rank 0, whose machine may see no other folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_runner.distributed import gather_objects

PIECE_BYTES = 16 * 2**20  # a rank holds no more of a file in memory


def gather_files(folder: Path, target: Path | None) -> OSError | None:
    """Copy the files of each rank's folder into one folder of rank 0. Collective: every rank.

    Args:
        folder: of this rank's files; no two ranks have a name in common.
        target: where rank 0 puts them; None on the other ranks.

    Returns:
        Why rank 0 cannot write them, on rank 0. It has received all of them even so, since the
        other ranks wait for that.
    """
    own = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    failure: OSError | None = None
    for rank, files in enumerate(gather_objects(own)):
        for name, num_bytes in files.items():
            if target is None and rank == dist.get_rank():
                _send(folder / name, num_bytes)
            elif target is not None:
                try:
                    if rank == 0:
                        shutil.copyfile(folder / name, target / name)
                    else:
                        _receive(target / name, num_bytes, rank=rank)
                except OSError as error:
                    failure = failure or error
    return failure


def _pieces(num_bytes: int) -> list[int]:
    return [min(PIECE_BYTES, num_bytes - start) for start in range(0, num_bytes, PIECE_BYTES)]


def _send(path: Path, num_bytes: int) -> None:
    with path.open("rb") as file:
        for size in _pieces(num_bytes):
            piece = bytearray(file.read(size))
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), dst=0)


def _receive(path: Path, num_bytes: int, *, rank: int) -> None:
    """Write what a rank sends. Receive all of it even if it cannot be written: the rank waits."""
    pieces = _received(num_bytes, rank=rank)
    try:
        with path.open("wb") as file:
            file.writelines(pieces)
    finally:
        for _ in pieces:
            pass


def _received(num_bytes: int, *, rank: int) -> Iterator[bytes]:
    for size in _pieces(num_bytes):
        piece = torch.empty(size, dtype=torch.uint8)
        dist.recv(piece, src=rank)
        yield piece.numpy().tobytes()
