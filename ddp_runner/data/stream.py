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
from ddp_runner.data.reader import Loaded, Readers
from ddp_runner.data.splits import NUM_FIRST, MicroBatch, Part
from ddp_runner.data.workers import loaded, loader_options
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
    num_samples = None

    def near(self, device: torch.device) -> "StreamSplit":
        """Return the split with pinned memory for a GPU, unless the user chose."""
        if self.pin_memory is not None:
            return self
        return replace(self, pin_memory=has_streams(device))

    def open(self, part: Part, *, state: Mapping[str, Any] | None = None) -> "OpenStream":
        """Begin one share of an epoch, or go on from a state of it."""
        return OpenStream(self, part, state)

    def first(self, numbers: Sequence[int] = range(NUM_FIRST), *, seed: int = 0) -> MicroBatch:
        """Return samples by their numbers, from an iterator anew; past the end it is the last.

        Raises:
            UserError: the stream has no sample.
        """
        alone = replace(
            self,
            collate_fn=partial(_picked, collate_fn=self.collate_fn, numbers=numbers),
            shuffle_buffer=0,
            num_workers=min(1, self.num_workers),
            prefetch_factor=1,
        )
        found = next(alone.open(Part(max(numbers) + 1, share=0, num_shares=1, seed=0)), None)
        if found is None:
            raise UserError(f"the {self.name} stream has no sample; give at least 1")
        return MicroBatch(found.data, num_samples=len(numbers))

    def in_order(self, part: Part, *, takes_turns: bool = False) -> Iterator[MicroBatch]:
        """Yield what the readers of a share take; see ``Split``."""
        for one in self.open(part):
            yield MicroBatch(one.data, one.num_samples)

    def notes(self, num_shares: int) -> list[str]:
        """Return what a user should know of the stream, a sentence each."""
        lines = [
            f"the {self.name} samples are a stream: which of them make a step depends on the "
            "number of ranks and workers, so runs that differ in these are outside parity"
        ]
        readers = Readers(self, Part(1, share=0, num_shares=num_shares, seed=0))
        if not readers.are_sharded and readers.count > 1:
            lines.append(
                f"each of {readers.count} readers (ranks x workers) reads the whole {self.name} "
                "stream and keeps its part; a dataset with shard(num_shards, index) and as many "
                "shards is read only once"
            )
        return lines


class OpenStream:
    """One share of an epoch of a stream, batch by batch."""

    def __init__(self, split: StreamSplit, part: Part, state: Mapping[str, Any] | None) -> None:
        self._loader: Any = None  # None: the share has ended
        self._batches: Iterator[Loaded] = iter(())
        if state is not None and state["loader"] is None:
            return
        self._loader = _stateful_loader(split, Readers(split, part))
        if state is not None:
            self._loader.load_state_dict(state["loader"])
        self._batches = loaded(self._loader, name=split.name)

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        try:
            return next(self._batches)
        except StopIteration:
            self._loader = None  # asked for its state, it would begin anew
            raise

    def state(self) -> dict[str, Any]:
        """Return what ``StreamSplit.open`` needs to go on after the last batch that was taken."""
        return {"loader": None if self._loader is None else self._loader.state_dict()}


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


def _picked(samples: list[Any], *, collate_fn: Collate, numbers: Sequence[int]) -> Any:
    return collate_fn([samples[min(number, len(samples) - 1)] for number in numbers])
