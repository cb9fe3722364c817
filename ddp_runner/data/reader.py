"""Reads one share of a stream: block by block, from a place that it saves and goes on from."""

import copy
import traceback
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddp_runner.data.splits import EpochShare
from ddp_runner.data.workers import LoadFailure
from ddp_runner.errors import UserError, typed
from ddp_runner.files import leaves
from ddp_runner.seeds import derive, seed_generators

STATES = ("of_dataset", "of_iterator")
PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)  # what a checkpoint holds


class Loaded(NamedTuple):
    """A batch of a stream."""

    data: Any  # what collate_fn returned
    num_samples: int  # of the stream
    copies: int = 1  # of each sample in the data


class Readers(IterableDataset[Loaded | LoadFailure]):
    """The readers of one rank, of a ``StreamSplit``.

    Iterating gives the reader of this process, which makes batches.
    """

    def __init__(self, split: Any, part: EpochShare) -> None:
        self.name, self.dataset, self.part = split.name, split.dataset, part
        self.collate_fn, self.transform = split.collate_fn, split.transform
        self.block_size = max(1, split.shuffle_buffer // part.batch_size) * part.batch_size
        self.is_shuffled = split.shuffle_buffer > 1
        self._per_rank = max(1, split.num_workers)
        self.count = part.num_shares * self._per_rank

    @property
    def are_sharded(self) -> bool:
        """Return whether the dataset gives each reader a part of its own."""
        if not callable(getattr(self.dataset, "shard", None)):
            return False
        return bool(getattr(self.dataset, "num_shards", self.count) >= self.count)

    def __iter__(self) -> "_Reader":
        worker, number = get_worker_info(), self.part.share * self._per_rank
        if worker is None:
            return _Reader(self, self._copied(), number)
        # The readers split the stream already, so the dataset must not see that a worker reads it.
        # torch has no public name for this; checked with 2.11 to 2.15.
        torch.utils.data._utils.worker._worker_info = None
        return _Reader(self, self.dataset, number + worker.id)

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
    """The batches of one reader. It has the methods that torchdata saves and restores it by.

    Its place is where a block begins, and the batches of the block that were taken. A dataset or an
    iterator with a state of its own is put back to the block's beginning; any other stream is read
    once more up to there.
    """

    def __init__(self, readers: Readers, dataset: Any, number: int) -> None:
        self._of, self._dataset, self._number = readers, dataset, number
        self._is_sharded = readers.are_sharded
        self._samples: Any = None  # the open iterator
        self._ready = deque[list[Any]]()  # the batches of the block that are still to come
        self._block = self._num_read = 0  # of the next block, and the samples before it
        self._has_ended = False  # there is no such block
        self._states: dict[str, Any] = {}  # of the dataset and its iterator, before the next block
        self._place: dict[str, Any] = {"block": 0, "num_taken": 0}
        self._restored: Mapping[str, Any] | None = None  # a place that is to be restored

    def __iter__(self) -> "_Reader":
        return self

    def __next__(self) -> Loaded | LoadFailure:
        try:
            batch = self._next_batch()
        except UserError as error:
            return LoadFailure(str(error), traceback.format_exc())
        except Exception as error:  # of the user's code: any kind
            return LoadFailure(
                f"the {self._of.name} stream failed near sample {self._num_read}: "
                f"{typed(error)}; mend the dataset, its transform or its collate_fn (the traceback "
                "is in logs/)",
                traceback.format_exc(),
            )
        if batch is None:
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch."""
        return dict(self._restored or self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place at the next batch: there an error can be reported."""
        self._restored = state

    def _next_batch(self) -> Loaded | None:
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None
        if not self._ready and not self._has_ended:
            self._read_block()
        if not self._ready:
            return None
        samples = self._ready.popleft()
        seed_generators(self._seed("batch", self._place["block"], self._place["num_taken"]))
        self._place["num_taken"] += 1
        transform, part = self._of.transform, self._of.part
        if transform is not None:
            samples = [transform(sample) for sample in samples]
        copies = 2 if part.doubles_single and len(samples) == 1 < part.batch_size else 1
        return Loaded(self._of.collate_fn(samples * copies), len(samples), copies)

    def _restore(self, place: Mapping[str, Any]) -> None:
        self._states = {key: place[key] for key in STATES if place.get(key) is not None}
        if self._states:
            self._block, self._num_read = place["block"], place["num_read"]
        while self._block < place["block"] and not self._has_ended:
            self._read_block()
            self._ready.clear()
        if place["num_taken"]:
            self._read_block()
            for _ in range(place["num_taken"]):
                self._ready.popleft()
            self._place["num_taken"] = place["num_taken"]

    def _read_block(self) -> None:
        """Read the next block, shuffle it if asked, and cut it into batches.

        A reader of the whole stream reads as many samples as its block times the readers. So all
        readers seed their generators at the same places, and a stream that draws its order gives
        all of them the same one.
        """
        if self._samples is None:
            self._open()
        block, size, name = self._block, self._of.part.batch_size, self._of.name
        self._place = {"block": block, "num_read": self._num_read, "num_taken": 0, **self._states}
        seed_generators(self._stream_seed("block", block))
        stride, own = (1, 0) if self._is_sharded else (self._of.count, self._number)
        samples, num_read, most = list[Any](), 0, self._of.block_size * stride
        for number, sample in enumerate(islice(self._samples, most)):
            if number % stride == own:
                samples.append(sample)
            num_read = number + 1
        if self._of.is_shuffled:
            generator = torch.Generator().manual_seed(self._seed("shuffle", block))
            samples = [samples[i] for i in torch.randperm(len(samples), generator=generator)]
        self._ready = deque(samples[i : i + size] for i in range(0, len(samples), size))
        self._block, self._num_read = block + 1, self._num_read + num_read
        self._has_ended = num_read < most
        own_states = {"of_dataset": state_of(self._dataset, name)}
        if self._samples is not self._dataset:
            own_states["of_iterator"] = state_of(self._samples, name)
        self._states = own_states

    def _open(self) -> None:
        """Begin to read this reader's part of the epoch, or go on from a user's own state."""
        seed_generators(self._stream_seed("start"))
        if self._is_sharded:
            count, number = self._of.count, self._number
            self._dataset = self._dataset.shard(num_shards=count, index=number)
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(self._of.part.epoch)
        # Copies, since the user's code may keep them and change them.
        if (state := self._states.get("of_dataset")) is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        self._samples = iter(self._dataset)
        if (state := self._states.get("of_iterator")) is not None:
            self._samples.load_state_dict(copy.deepcopy(state))

    def _seed(self, *labels: str | int) -> int:
        part = self._of.part
        return derive(part.seed, self._of.name, "reader", part.epoch, self._number, *labels)

    def _stream_seed(self, *labels: str | int) -> int:
        """Return a seed for what the stream draws: the same for all readers of the same stream."""
        part, number = self._of.part, self._number if self._is_sharded else 0
        return derive(part.seed, self._of.name, "stream", part.epoch, number, *labels)


def state_of(part: Any, name: str) -> Any:
    """Return a copy of what the state_dict of a dataset or an iterator returns; None: it has none.

    `name` is the split's, for messages.

    Raises:
        UserError: a checkpoint cannot hold the state.
    """
    if not all(hasattr(part, method) for method in ("state_dict", "load_state_dict")):
        return None
    state = copy.deepcopy(part.state_dict())
    for place, value in leaves(state, f"the state of the {name} stream"):
        if not isinstance(value, PLAIN):
            raise UserError(
                f"{place} is a {type(value).__name__}, which a checkpoint cannot hold; return "
                "numbers, texts and tensors from its state_dict, in lists, tuples and dicts"
            )
    return state
