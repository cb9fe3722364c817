"""Reads one share of a stream: block by block, in a state that can be saved and restored."""

import copy
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddp_runner.data.loader import Collate
from ddp_runner.data.stream_state import BlockStart, state_of
from ddp_runner.data.workers import Failure
from ddp_runner.errors import UserError, typed
from ddp_runner.seeds import derive, seed_generators


class Loaded(NamedTuple):
    """A batch of a stream."""

    data: Any  # what collate_fn returned
    num_samples: int  # of the stream
    copies: int = 1  # of each sample in the data


@dataclass(frozen=True)
class Part:
    """One rank's part of an epoch."""

    batch_size: int
    rank: int
    num_ranks: int
    seed: int
    epoch: int = 0
    doubles_single: bool = False  # give a batch of one sample twice: see ``Loaded``


class Readers(IterableDataset[Loaded | Failure]):
    """The readers of one rank; iterating gives the reader of this process, which makes batches."""

    def __init__(
        self,
        name: str,
        dataset: Any,
        *,
        collate_fn: Collate,
        transform: Callable[[Any], Any] | None,
        shuffle_buffer: int,
        part: Part,
        per_rank: int,
    ) -> None:
        self.name, self.dataset, self.part = name, dataset, part
        self.collate_fn, self.transform = collate_fn, transform
        self.block_size = max(1, shuffle_buffer // part.batch_size) * part.batch_size
        self.is_shuffled = shuffle_buffer > 1
        self._per_rank = per_rank
        self.count = part.num_ranks * per_rank

    @property
    def are_sharded(self) -> bool:
        """Return whether the dataset gives each reader a part of its own."""
        if not callable(getattr(self.dataset, "shard", None)):
            return False
        return bool(getattr(self.dataset, "num_shards", self.count) >= self.count)

    def __iter__(self) -> "_Reader":
        worker, dataset = get_worker_info(), self.dataset
        number = self.part.rank * self._per_rank
        if worker is None:
            dataset = self._copied()
        else:
            number += worker.id
            _hide_worker()
        return _Reader(self, dataset, number)

    def _copied(self) -> Any:
        """Return a copy of the dataset, since each epoch begins with the dataset as it was built.

        A worker process has a copy anyway.
        """
        try:
            return copy.deepcopy(self.dataset)
        except Exception as error:  # of the user's code: any kind
            raise UserError(
                f"the {self.name} dataset cannot be copied for an epoch ({typed(error)}); open its "
                "files in __iter__, or write dataset.num_workers=1"
            ) from error


class _Reader:
    """The batches of one reader. It has the methods that torchdata saves and restores it by."""

    def __init__(self, readers: Readers, dataset: Any, number: int) -> None:
        self._of, self._dataset, self._number = readers, dataset, number
        self._is_sharded = readers.are_sharded
        self._samples: Any = None  # the open iterator
        self._ready = deque[list[Any]]()  # the batches of the block that are still to come
        self._num_taken = 0  # batches of the block that were taken
        self._start = self._next = BlockStart()
        self._restored: Mapping[str, Any] | None = None  # a state that is to be restored

    def __iter__(self) -> "_Reader":
        return self

    def __next__(self) -> Loaded | Failure:
        try:
            batch = self._next_batch()
        except UserError as error:
            return Failure(str(error), traceback.format_exc())
        except Exception as error:  # of the user's code: any kind
            return Failure(
                f"the {self._of.name} stream failed near sample {self._next.num_read}: "
                f"{typed(error)}; mend the dataset, its transform or its collate_fn (the traceback "
                "is in logs/)",
                traceback.format_exc(),
            )
        if batch is None:
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the reader is: the start of a block, and the batches taken since."""
        if self._restored is not None:
            return dict(self._restored)
        start, num_taken = (self._start, self._num_taken) if self._ready else (self._next, 0)
        return vars(start) | {"num_taken": num_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next batch: there an error can be reported."""
        self._restored = state

    def _next_batch(self) -> Loaded | None:
        if self._restored is not None:
            self._restore(**self._restored)
            self._restored = None
        if not self._ready and not self._next.has_ended:
            self._read_block()
        if not self._ready:
            return None
        samples = self._ready.popleft()
        seed_generators(self._seed("batch", self._start.block, self._num_taken))
        self._num_taken += 1
        transform, part = self._of.transform, self._of.part
        if transform is not None:
            samples = [transform(sample) for sample in samples]
        copies = 2 if part.doubles_single and len(samples) == 1 < part.batch_size else 1
        return Loaded(self._of.collate_fn(samples * copies), len(samples), copies)

    def _restore(self, *, num_taken: int, **fields: Any) -> None:
        start = BlockStart(**fields)
        if start.has_state or start.has_ended:
            self._next = start
        else:  # read once more what was read before
            while self._next.block < start.block and not self._next.has_ended:
                self._read_block()
                self._ready.clear()
        if num_taken:
            self._read_block()
            for _ in range(num_taken):
                self._ready.popleft()
            self._num_taken = num_taken

    def _read_block(self) -> None:
        """Read the next block, shuffle it if asked, and cut it into batches.

        A reader of the whole stream reads as many samples as its block times the readers. So all
        readers seed their generators at the same places, and a stream that draws its order gives
        all of them the same one.
        """
        start, size = self._next, self._of.part.batch_size
        if self._samples is None:
            self._open(start)
        seed_generators(self._stream_seed("block", start.block))
        stride, own = (1, 0) if self._is_sharded else (self._of.count, self._number)
        samples, num_read, most = list[Any](), 0, self._of.block_size * stride
        for number, sample in enumerate(islice(self._samples, most)):
            if number % stride == own:
                samples.append(sample)
            num_read = number + 1
        if self._of.is_shuffled:
            generator = torch.Generator().manual_seed(self._seed("shuffle", start.block))
            samples = [samples[i] for i in torch.randperm(len(samples), generator=generator)]
        self._ready = deque(samples[i : i + size] for i in range(0, len(samples), size))
        self._start, self._num_taken = start, 0
        of_iterator, name = None, self._of.name
        if self._samples is not self._dataset:
            of_iterator = state_of(self._samples, name)
        self._next = BlockStart(
            start.block + 1,
            start.num_read + num_read,
            has_ended=num_read < most,
            of_dataset=state_of(self._dataset, name),
            of_iterator=of_iterator,
        )

    def _open(self, start: "BlockStart") -> None:
        """Begin to read this reader's part of the epoch, or go on from a user's own state."""
        seed_generators(self._stream_seed("start"))
        if self._is_sharded:
            count, number = self._of.count, self._number
            self._dataset = self._dataset.shard(num_shards=count, index=number)
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(self._of.part.epoch)
        # Copies, since the user's code may keep them and change them.
        if start.of_dataset is not None:
            self._dataset.load_state_dict(copy.deepcopy(start.of_dataset))
        self._samples = iter(self._dataset)
        if start.of_iterator is not None:
            self._samples.load_state_dict(copy.deepcopy(start.of_iterator))

    def _seed(self, *labels: str | int) -> int:
        part = self._of.part
        return derive(part.seed, self._of.name, "reader", part.epoch, self._number, *labels)

    def _stream_seed(self, *labels: str | int) -> int:
        """Return a seed for what the stream draws: the same for all readers of the same stream."""
        part, number = self._of.part, self._number if self._is_sharded else 0
        return derive(part.seed, self._of.name, "stream", part.epoch, number, *labels)


def _hide_worker() -> None:
    """Let the dataset not see that a worker reads it, since it would split the stream once more.

    The readers split it already. torch has no public name for this; checked with 2.11 to 2.15.
    """
    torch.utils.data._utils.worker._worker_info = None
