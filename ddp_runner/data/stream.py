"""A stream as a split, such as an IterableDataset: its samples, its steps, and where it ends."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import default_collate

from ddp_runner.data.batches import Batches, StepBatch
from ddp_runner.data.loader import Collate
from ddp_runner.data.reader import Loaded, Readers
from ddp_runner.data.splits import NUM_FIRST, EpochShare, MicroBatch
from ddp_runner.data.workers import loaded, loader_options
from ddp_runner.device import has_streams
from ddp_runner.distributed import add_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart


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

    def open(self, part: EpochShare, *, state: Mapping[str, Any] | None = None) -> "OpenStream":
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
        found = next(alone.open(EpochShare(max(numbers) + 1, share=0, num_shares=1, seed=0)), None)
        if found is None:
            raise UserError(f"the {self.name} stream has no sample; give at least 1")
        return MicroBatch(found.data, num_samples=len(numbers))

    def in_order(self, part: EpochShare, *, takes_turns: bool = False) -> Iterator[MicroBatch]:
        """Yield what the readers of a share take; see ``Split``."""
        for one in self.open(part):
            yield MicroBatch(one.data, one.num_samples)

    def notes(self, num_shares: int) -> list[str]:
        """Return what a user should know of the stream, a sentence each."""
        lines = [
            f"the {self.name} samples are a stream: which of them make a step depends on the "
            "number of ranks and workers, so runs that differ in these are outside parity"
        ]
        readers = Readers(self, EpochShare(1, share=0, num_shares=num_shares, seed=0))
        if not readers.are_sharded and readers.count > 1:
            lines.append(
                f"each of {readers.count} readers (ranks x workers) reads the whole {self.name} "
                "stream and keeps its part; a dataset with shard(num_shards, index) and as many "
                "shards is read only once"
            )
        return lines


class OpenStream:
    """One share of an epoch of a stream, batch by batch."""

    def __init__(
        self, split: StreamSplit, part: EpochShare, state: Mapping[str, Any] | None
    ) -> None:
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


@dataclass(kw_only=True)
class StreamBatches(Batches):
    """One share of the steps of a training stream.

    A step has up to ``global_size`` samples. Towards the end of an epoch it has fewer, since the
    parts of ranks and workers end at different times. Collective: every rank must take all steps,
    or as many as the others.
    """

    split: StreamSplit
    mark: Callable[[StepPart], None] = field(repr=False)  # of the timer
    group: ProcessGroup | None = None  # one rank of each share; None: all
    # Where this rank's readers are; None between two epochs.
    _readers: Mapping[str, Any] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from the place on.

        Raises:
            UserError: the stream has no sample in an epoch, on any rank.
        """
        while True:
            part = EpochShare(
                self.micro_size,
                self.share,
                self.num_shares,
                seed=self.seed,
                epoch=self.epoch,
                doubles_single=True,
            )
            stream = self.split.open(part, state=self._readers)
            step = self._load(stream)
            if not step.global_count:
                where, fix = f"epoch {self.epoch + 1}", "its __iter__ must begin anew each time"
                if self.step:
                    where, fix = f"{where} after step {self.step}", "it is shorter than it was"
                raise UserError(f"the {self.split.name} stream has no sample in {where}; {fix}")
            while step.global_count:
                following = self._load(stream)  # one step ahead, so is_last is known
                is_last, number = not following.global_count, self.step
                self._advance(is_last=is_last)
                self._readers = None if is_last else step.readers
                yield StepBatch(self._padded(step), step.global_count, number, is_last)
                step = following

    @property
    def steps_per_epoch(self) -> None:
        """Return None: an epoch ends when the stream ends."""

    @property
    def order(self) -> Mapping[str, object]:
        """Return what decides which samples are still to come in an epoch."""
        return {
            "seed": self.seed,
            "ranks with samples of their own": self.num_shares,
            "dataset.num_workers": self.split.num_workers,
            "samples of a micro-batch": self.micro_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the place, with this rank's readers: amid an epoch it differs between ranks."""
        return {**super().state_dict(), "readers": self._readers}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See ``Batches``."""
        super().load_state_dict(saved)
        self._readers = saved["readers"]

    def _load(self, stream: OpenStream) -> "_Loaded":
        """Load this rank's part of the next step, and exchange its size. Collective."""
        loaded = tuple(islice(stream, self.grad_accum_steps))
        parts = tuple(
            MicroBatch(one.data, one.num_samples * one.copies, 1 / one.copies) for one in loaded
        )
        sizes = torch.zeros(self.num_shares, 2, dtype=torch.int64)
        sizes[self.share] = torch.tensor([sum(one.num_samples for one in loaded), len(loaded)])
        self.mark(StepPart.DATA)  # the ranks meet here, so a slow one lets the others wait
        all_sizes = add_over_ranks(sizes, self.group)
        self.mark(StepPart.WAIT)
        return _Loaded(parts, all_sizes, stream.state())

    def _padded(self, step: "_Loaded") -> tuple[MicroBatch, ...]:
        """Return as many micro-batches as the rank with the most has: collectives match."""
        num_missing = int(step.sizes[:, 1].max()) - len(step.parts)
        return step.parts + num_missing * (self._placeholder,) if num_missing else step.parts

    @cached_property
    def _placeholder(self) -> MicroBatch:
        """Two samples without weight; one if all micro-batches have one."""
        return replace(self.split.first(range(min(2, self.micro_size))), weight=0.0)


@dataclass(frozen=True)
class _Loaded:
    """This rank's part of a step."""

    parts: tuple[MicroBatch, ...]
    sizes: Tensor  # samples and micro-batches of each share, int64 (num_shares, 2)
    readers: Mapping[str, Any]  # where they are after it

    @property
    def global_count(self) -> int:
        """Return the samples over all shares."""
        return int(self.sizes[:, 0].sum())


NEEDS_STREAMS_EXTRA = 'a stream needs torchdata; write pip install "ddp-runner[streams]"'
