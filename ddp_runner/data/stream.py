"""A stream, such as an IterableDataset, as a split, and the steps of a training on it."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ddp_runner.data.batches import Batches, StepBatch
from ddp_runner.data.loader import Collate, Loading, loader_options, start_loading
from ddp_runner.data.reader import Readers
from ddp_runner.data.splits import NUM_FIRST, EpochShare, MicroBatch, NumberedSplit
from ddp_runner.distributed import add_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart


@dataclass(frozen=True)
class StreamSplit(Loading):
    """The samples of an iterable dataset."""

    shuffle_buffer: int = 0  # samples that a reader shuffles at a time; 0: in the stream's order
    num_samples = None

    def open(self, part: EpochShare, *, state: Mapping[str, Any] | None = None) -> "OpenStream":
        """Start one share of an epoch, or continue it from a state."""
        return OpenStream(self, part, state)

    def first(self, numbers: Sequence[int] = range(NUM_FIRST), *, seed: int = 0) -> MicroBatch:
        """Return samples by their numbers from a new iterator; past the end, the last sample.

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
        batch = next(alone.open(EpochShare(max(numbers) + 1, share=0, num_shares=1, seed=0)), None)
        if batch is None:
            raise UserError(f"the {self.name} stream has no sample", "give at least 1")
        return batch._replace(num_samples=len(numbers))

    def in_order(self, part: EpochShare, *, takes_turns: bool = False) -> Iterator[MicroBatch]:
        """See ``NumberedSplit``; a single reader keeps the stream's order."""
        return self.open(part)

    def notes(self, num_shares: int) -> tuple[str, ...]:
        """Return sentences to log before a training on this number of shares."""
        order = (
            f"the {self.name} samples are a stream: which of them make a step depends on the "
            "number of ranks and workers, so runs that differ in these are outside parity"
        )
        readers = Readers(self, EpochShare(1, share=0, num_shares=num_shares, seed=0))
        if readers.are_sharded or readers.count == 1:
            return (order,)
        return (
            order,
            f"each of {readers.count} readers (ranks x workers) reads the whole {self.name} stream "
            "and keeps its part; to read it once, give the dataset that number of shards and a "
            "method shard(num_shards, index)",
        )


Split = NumberedSplit | StreamSplit


class OpenStream:
    """One share of an epoch of a stream, batch by batch."""

    def __init__(
        self, split: StreamSplit, part: EpochShare, state: Mapping[str, Any] | None
    ) -> None:
        self._loader: Any = None  # None: the share has ended
        self._batches: Iterator[MicroBatch] = iter(())
        if state is not None and state["loader"] is None:
            return
        self._loader = _stateful_loader(split, Readers(split, part))
        if state is not None:
            self._loader.load_state_dict(state["loader"])
        self._batches = start_loading(self._loader, name=split.name)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        batch = next(self._batches, None)
        if batch is None:
            self._loader = None  # its state would be that of a new epoch
            raise StopIteration
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state from which ``StreamSplit.open`` continues after the last batch."""
        return {"loader": None if self._loader is None else self._loader.state_dict()}


def _stateful_loader(split: StreamSplit, readers: Readers) -> Any:
    if find_spec("torchdata") is None:
        raise UserError("a stream needs torchdata", 'write pip install "ddp-runner[streams]"')
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital'")  # torchdata uses a deprecated name
        # Without a batch_size, since a reader makes whole batches.
        return StatefulDataLoader(readers, batch_size=None, **loader_options(split))


def _picked(samples: list[Any], *, collate_fn: Collate, numbers: Sequence[int]) -> Any:
    return collate_fn([samples[min(number, len(samples) - 1)] for number in numbers])


@dataclass(kw_only=True)
class StreamBatches(Batches):
    """One share of the steps of a training stream.

    A step has up to ``global_size`` samples. Towards the end of an epoch it has fewer, since the
    parts of ranks and workers end at different times. Collective: every rank must take the same
    number of steps.
    """

    split: StreamSplit
    mark: Callable[[StepPart], None] = field(repr=False)  # the step timer's method
    group: ProcessGroup | None = None  # one rank of each share; None: all ranks
    # State of this rank's readers; None between two epochs.
    _readers: Mapping[str, Any] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from the position on.

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
            parts, count, readers = self._load(stream)
            if not count:
                where, fix = f"epoch {self.epoch + 1}", "let its __iter__ start again each time"
                if self.step:
                    where, fix = f"{where} after step {self.step}", "give the samples of the save"
                raise UserError(f"the {self.split.name} stream has no sample in {where}", fix)
            while count:
                following = self._load(stream)  # one step ahead, to know is_last
                step = StepBatch(parts, count, number=self.step, is_last=not following[1])
                self._advance(is_last=step.is_last)
                self._readers = None if step.is_last else readers
                yield step
                parts, count, readers = following

    @property
    def steps_per_epoch(self) -> None:
        """Return None: an epoch ends when the stream ends."""

    @property
    def order(self) -> Mapping[str, object]:
        """See ``Batches``."""
        return {
            "seed": self.seed,
            "ranks with samples of their own": self.num_shares,
            "dataset.num_workers": self.split.num_workers,
            "samples of a micro-batch": self.micro_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and this rank's readers; inside an epoch it differs between ranks."""
        return {**super().state_dict(), "readers": self._readers}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See ``Batches``."""
        super().load_state_dict(saved)
        self._readers = saved["readers"]

    def _load(self, stream: OpenStream) -> tuple[tuple[MicroBatch, ...], int, Mapping[str, Any]]:
        """Load this rank's part of the next step, and exchange its size. Collective.

        Returns:
            The micro-batches, as many on each rank; the samples over all ranks; and the state of
            this rank's readers after them.
        """
        parts = tuple(islice(stream, self.grad_accum_steps))
        sizes = torch.zeros(self.num_shares, 2, dtype=torch.int64)
        sizes[self.share] = torch.tensor([sum(p.num_samples * p.weight for p in parts), len(parts)])
        self.mark(StepPart.DATA)
        counts, lengths = add_over_ranks(sizes, self.group).unbind(dim=1)
        self.mark(StepPart.WAIT)  # for a slower rank
        if num_missing := int(lengths.max()) - len(parts):
            parts += num_missing * (self._placeholder,)
        return parts, int(counts.sum()), stream.state()

    @cached_property
    def _placeholder(self) -> MicroBatch:
        """Two samples with weight 0; a single sample if micro-batches have one sample."""
        return self.split.first(range(min(2, self.micro_size)))._replace(weight=0.0)
