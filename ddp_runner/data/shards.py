"""Samples in tar files (shards), as WebDataset and ``tar`` write them, each read where it lies.

Consecutive files with one name up to its first dot are a sample: 000017.jpg and 000017.cls. An
index knows where each file begins, so a shard need not be read in its order: the samples' order is
that of any other dataset. Shards spare a cluster's file system millions of small files.
"""

import os
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ddp_runner.errors import UserError, one_line, os_errors, typed

MOST_OPEN = 128  # shards that a process keeps open: a limit of 1024 files is common
INDEX_THREADS = 16  # shards that are indexed at once: a cluster's file system takes long to answer
NONE = -1  # the size of a file that a sample lacks
HEADER = 512  # bytes before each file of a tar


@dataclass(frozen=True)
class ShardIndex:
    """Where the files of all samples of a split lie."""

    paths: Sequence[str]  # of the shards
    endings: Sequence[str]  # that files of samples have, such as jpg and cls
    # int64 (num_samples, 1 + 2 * len(endings)): the shard, then each file's offset and size in
    # bytes.
    places: Tensor
    marks: Tensor  # int64 (num_samples,): of the names, sizes and times of a sample's files


def index_shards(paths: Sequence[Path]) -> ShardIndex:
    """Return the index of the samples in these shards, in their order.

    Raises:
        UserError: a shard is damaged, compressed, or holds no sample.
    """
    with ThreadPoolExecutor(INDEX_THREADS) as pool:
        parts = list(pool.map(_index_shard, paths))
    endings = sorted({ending for found, _, _ in parts for ending in found})
    places = []
    for shard, (found, of_shard, _) in enumerate(parts):
        own = torch.full((len(of_shard), 1 + 2 * len(endings)), NONE)
        own[:, 0] = shard
        for number, ending in enumerate(found):
            column = 1 + 2 * endings.index(ending)
            own[:, column : column + 2] = of_shard[:, 2 * number : 2 * number + 2]
        places.append(own)
    marks = torch.cat([marks for _, _, marks in parts])
    return ShardIndex([str(path.absolute()) for path in paths], endings, torch.cat(places), marks)


def _index_shard(path: Path) -> tuple[list[str], Tensor, Tensor]:
    """Return a shard's endings, the places of its samples' files by ending, and their marks."""
    samples, marks, last = list[dict[str, tuple[int, int]]](), list[int](), None
    try:
        with tarfile.open(path, "r:") as shard:  # without compression, so that files can be found
            for member in shard:
                key, ending = _split_name(member.name)
                if not member.isreg() or not key or not ending:
                    continue
                if key != last:
                    samples.append({})
                    marks.append(0)
                    last = key
                if ending in samples[-1]:
                    raise UserError(f"{path.absolute()} holds {member.name} twice; write it anew")
                samples[-1][ending] = (member.offset_data, member.size)
                text = f"{member.name}\0{member.size}\0{member.mtime}"
                marks[-1] = zlib.crc32(os.fsencode(text), marks[-1])
            _validate_end(path, shard.offset)
    except (OSError, tarfile.TarError) as error:
        raise UserError(
            f"{path.absolute()} cannot be read as an uncompressed tar file ({one_line(error)}); "
            "replace it, or unpack it with gunzip"
        ) from error
    if not samples:
        raise UserError(f"{path.absolute()} holds no files such as 000017.jpg; remove it")
    endings = sorted({ending for sample in samples for ending in sample})
    places = [
        [number for ending in endings for number in sample.get(ending, (NONE, NONE))]
        for sample in samples
    ]
    return endings, torch.tensor(places), torch.tensor(marks)


def _validate_end(path: Path, offset: int) -> None:
    """Reject a shard that has more than the end mark of a tar, which is zeros, or not even that.

    tarfile stops at a damaged header as if it were the end, and the samples after it would be lost.

    Raises:
        UserError: the message has the byte.
    """
    with path.open("rb") as file:
        file.seek(offset)
        first = file.read(HEADER)
        is_zero = not first.strip(b"\0")
        while is_zero and (rest := file.read(2**20)):
            is_zero = not rest.strip(b"\0")
    if len(first) < HEADER or not is_zero:
        raise UserError(
            f"{path.absolute()} is damaged: at byte {offset:,} there is neither a file nor the end "
            "mark of a tar; replace it"
        )


def _split_name(name: str) -> tuple[str, str]:
    """Return a file's path up to the first dot of its name, and what follows that dot."""
    folder, slash, last = name.rpartition("/")
    stem, _, ending = last.partition(".")
    return f"{folder}{slash}{stem}" if stem else "", ending.lower()


class ShardSamples:
    """The samples of an index as a map-style dataset; a sample is what `decode` returns."""

    def __init__(self, index: ShardIndex, decode: Callable[[Mapping[str, bytes]], Any]) -> None:
        """Read with this index; `decode` gets a sample's files by their endings."""
        self._index, self._decode = index, decode

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._index.places)

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample.

        Raises:
            UserError: its files cannot be read or decoded; the message has the shard and the key.
        """
        shard, *places = self._index.places[index].tolist()
        path = self._index.paths[shard]
        files = {
            ending: _read(path, offset, size)
            for ending, offset, size in zip(
                self._index.endings, places[::2], places[1::2], strict=True
            )
            if size != NONE
        }
        try:
            return self._decode(files)
        except Exception as error:  # of the user's code or of damaged bytes: any kind
            first = next(offset for offset in places[::2] if offset != NONE)
            reason = one_line(error) if isinstance(error, UserError) else typed(error)
            raise UserError(f"{path}: sample {_key(path, first)}: {reason}") from error


@lru_cache(MOST_OPEN)
def _opened(path: str) -> BinaryIO:
    """Return an open shard. Reading at a place moves no position, so forked workers share it."""
    return Path(path).open("rb", buffering=0)


def _read(path: str, offset: int, size: int) -> bytes:
    with os_errors(f"{path} cannot be read", fix="put it back"):
        content = os.pread(_opened(path).fileno(), size, offset)
    if len(content) != size:
        raise UserError(
            f"{path} ends before byte {offset + size:,}, and it was longer when the run started; "
            "put it back as it was"
        )
    return content


def _key(path: str, offset: int) -> str:
    """Return the key of a sample, from the header before one of its files."""
    header = _read(path, offset - HEADER, HEADER)
    name = header[:100].rstrip(b"\0").decode(errors="backslashreplace")
    return _split_name(name)[0]
