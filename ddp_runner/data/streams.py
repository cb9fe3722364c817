"""A stream as a split: samples that come one after another, such as those of an IterableDataset.

Each rank has readers: its worker processes, or itself without any. All readers together take each
sample once. A dataset with ``shard(num_shards, index)`` gives each reader a part of its own. Of any
other dataset each of n readers reads the whole stream and takes every n-th sample.

torchdata's ``StatefulDataLoader`` runs the workers and collects their states. What a stream and a
transform draw at random follows from the seed, the epoch, the reader and the number of the batch.
So a resumed run goes on bit for bit, with as many ranks and workers as before.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from ddp_runner.data.loader import Collate
from ddp_runner.data.splits import AbsentSplit, Split
from ddp_runner.data.stream_reader import Loaded, Part, Readers
from ddp_runner.data.workers import loaded, loader_options, started
from ddp_runner.device import has_streams
from ddp_runner.errors import UserError

NEEDS_STREAMS_EXTRA = 'a stream needs torchdata; write pip install "ddp-runner[streams]"'


@dataclass(frozen=True)
class StreamSplit:
    """The samples of an iterable dataset; a batch is what `collate_fn` returns."""

    name: str  # in messages: "train", "eval"
    dataset: Iterable[Any]
    collate_fn: Collate = default_collate
    transform: Callable[[Any], Any] | None = None  # of a sample, before collate_fn
    shuffle_buffer: int = 0  # samples that a reader shuffles at a time; 0: in the stream's order
    num_workers: int = 0  # processes that load; 0: the rank loads by itself
    prefetch_factor: int = 2  # batches that each worker loads ahead
    pin_memory: bool | None = None  # None: if the rank has a GPU

    def near(self, device: torch.device, *, most_bytes: float) -> "StreamSplit":
        """Return the split with pinned memory for a GPU, unless the user chose."""
        if self.pin_memory is not None:
            return self
        return replace(self, pin_memory=has_streams(device))

    def open(self, part: Part, *, state: Mapping[str, Any] | None = None) -> "OpenStream":
        """Begin one rank's part of an epoch, or go on from a state of it."""
        return OpenStream(self, part, state)

    def first(self, indices: Sequence[int]) -> Any:
        """Return a batch of the stream's first samples, by their numbers, from an iterator anew.

        A number past the end is the last sample.

        Raises:
            UserError: the stream has no sample.
        """
        alone = replace(
            self,
            collate_fn=partial(_picked, collate_fn=self.collate_fn, indices=indices),
            shuffle_buffer=0,
            num_workers=min(1, self.num_workers),
            prefetch_factor=1,
        )
        batch = next(alone.open(Part(max(indices) + 1, rank=0, num_ranks=1, seed=0)), None)
        if batch is None:
            raise UserError(f"the {self.name} stream has no sample; give at least 1")
        return batch.data

    def notes(self, num_ranks: int) -> list[str]:
        """Return what a user should know of the stream, a sentence each."""
        lines = [
            f"the {self.name} samples are a stream: which of them make a step depends on the "
            "number of ranks and workers, so runs that differ in these are outside parity"
        ]
        readers = self._readers(Part(1, rank=0, num_ranks=num_ranks, seed=0))
        if not readers.are_sharded and readers.count > 1:
            lines.append(
                f"each of {readers.count} readers (ranks x workers) reads the whole {self.name} "
                "stream and keeps its part; a dataset with shard(num_shards, index) and as many "
                "shards is read only once"
            )
        return lines

    def _readers(self, part: Part) -> Readers:
        return Readers(
            self.name,
            self.dataset,
            collate_fn=self.collate_fn,
            transform=self.transform,
            shuffle_buffer=self.shuffle_buffer,
            part=part,
            per_rank=max(1, self.num_workers),
        )


AnySplit = Split | StreamSplit


def num_samples(split: AnySplit) -> int | None:
    """Return the number of samples; None for a stream, 0 for a split that is not given."""
    if isinstance(split, AbsentSplit):
        return 0
    return None if isinstance(split, StreamSplit) else len(split)


class OpenStream:
    """One rank's part of an epoch of a stream, batch by batch."""

    def __init__(self, split: StreamSplit, part: Part, state: Mapping[str, Any] | None) -> None:
        self._split, self._batch_size = split, part.batch_size
        self._has_ended = state is not None and state["loader"] is None
        self._batches: Iterator[Loaded] = iter(())
        if self._has_ended:
            return
        self._loader = _stateful_loader(split, split._readers(part))
        if state is not None:
            self._loader.load_state_dict(state["loader"])
        batches = started(self._loader)
        self._batches = loaded(batches, name=split.name, num_workers=split.num_workers)

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        try:
            return next(self._batches)
        except StopIteration:
            self._has_ended = True
            raise

    def state(self) -> dict[str, Any]:
        """Return what ``StreamSplit.open`` needs to go on after the last batch that was taken."""
        # A loader that has ended would begin anew.
        loader = None if self._has_ended else self._loader.state_dict()
        return {
            "num_workers": self._split.num_workers,
            "batch_size": self._batch_size,
            "loader": loader,
        }


def _stateful_loader(split: StreamSplit, readers: Readers) -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise UserError(NEEDS_STREAMS_EXTRA) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital'")  # torchdata's use of an old name
        return StatefulDataLoader(
            readers,
            batch_size=None,  # a reader makes whole batches
            **loader_options(split),
        )


def _picked(samples: list[Any], *, collate_fn: Collate, indices: Sequence[int]) -> Any:
    return collate_fn([samples[min(index, len(samples) - 1)] for index in indices])
