"""Reads one share of a stream, block by block, from a position that can be saved and restored."""

import copy
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddp_runner.data.loader import LoadFailure, load_safely
from ddp_runner.data.splits import EpochShare, MicroBatch
from ddp_runner.errors import UserError, any_error
from ddp_runner.files import leaves
from ddp_runner.seeds import derive, seed_generators

STATES = ("of_dataset", "of_iterator")  # keys of the user's states in a saved position
PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)  # types that checkpoints hold


class Readers(IterableDataset[MicroBatch | LoadFailure]):
    """The readers of one rank, for a ``StreamSplit``; iterating starts this process's reader."""

    def __init__(self, split: Any, part: EpochShare) -> None:
        self.name, self.dataset, self.part = split.name, split.dataset, part
        self.collate_fn, self.transform = split.collate_fn, split.transform
        self.block_size = max(1, split.shuffle_buffer // part.batch_size) * part.batch_size
        self.is_shuffled = split.shuffle_buffer > 1
        self._per_rank = max(1, split.num_workers)
        self.count = part.num_shares * self._per_rank

    @property
    def are_sharded(self) -> bool:
        """Return whether the dataset gives each reader a shard."""
        if not callable(getattr(self.dataset, "shard", None)):
            return False
        return bool(getattr(self.dataset, "num_shards", self.count) >= self.count)

    def __iter__(self) -> "_Reader":
        worker, number = get_worker_info(), self.part.share * self._per_rank
        if worker is not None:
            # The readers split the stream already, so the dataset must not split it by workers.
            # torch has no public name for this; checked with 2.11 to 2.15.
            torch.utils.data._utils.worker._worker_info = None
            return _Reader(self, self.dataset, number + worker.id)
        # Each epoch begins with the dataset as it was built; a worker has a copy anyway.
        with any_error(
            f"the {self.name} dataset cannot be copied for an epoch",  # it has an open file
            "open its files in __iter__, or write dataset.num_workers=1",
        ):
            dataset = copy.deepcopy(self.dataset)
        return _Reader(self, dataset, number)


class _Reader:
    """The batches of one reader; torchdata saves and restores it by its two state methods.

    Its position is the start of a block, and the number of the block's batches that were taken. A
    dataset or an iterator with a state is put back to the start of the block; any other stream is
    read again up to there.
    """

    def __init__(self, readers: Readers, dataset: Any, number: int) -> None:
        self._readers, self._dataset, self._number = readers, dataset, number
        self._is_sharded = readers.are_sharded
        self._samples: Any = None  # the open iterator
        self._ready = deque[list[Any]]()  # the remaining batches of the block
        self._block = self._num_read = 0  # number of the next block, and the samples before it
        self._has_ended = False  # there is no next block
        self._states: dict[str, Any] = {}  # of the dataset and its iterator, before the next block
        self._position: dict[str, Any] = {"block": 0, "num_taken": 0}
        self._restored: Mapping[str, Any] | None = None  # a position that is still to be restored

    def __iter__(self) -> "_Reader":
        return self

    def __next__(self) -> MicroBatch | LoadFailure:
        batch = load_safely(
            self._next_batch,
            lambda fault: (
                f"the {self._readers.name} stream failed near sample {self._num_read}: {fault}; "
                "fix the dataset, its transform or its collate_fn (the traceback is in logs/)"
            ),
        )
        if batch is None:
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch."""
        return dict(self._restored or self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position at the next batch, where an error can be reported."""
        self._restored = state

    def _next_batch(self) -> MicroBatch | None:
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None
        if not self._ready and not self._has_ended:
            self._read_block()
        if not self._ready:
            return None
        samples = self._ready.popleft()
        seed_generators(self._seed("batch", self._position["block"], self._position["num_taken"]))
        self._position["num_taken"] += 1
        transform, part = self._readers.transform, self._readers.part
        if transform is not None:
            samples = [transform(sample) for sample in samples]
        copies = 2 if part.doubles_single and len(samples) == 1 < part.batch_size else 1
        samples *= copies
        return MicroBatch(self._readers.collate_fn(samples), len(samples), 1 / copies)

    def _restore(self, position: Mapping[str, Any]) -> None:
        self._states = {key: position[key] for key in STATES if position.get(key) is not None}
        if self._states:
            self._block, self._num_read = position["block"], position["num_read"]
        while self._block < position["block"] and not self._has_ended:
            self._read_block()
            self._ready.clear()
        if position["num_taken"]:
            self._read_block()
            for _ in range(position["num_taken"]):
                self._ready.popleft()
            self._position["num_taken"] = position["num_taken"]

    def _read_block(self) -> None:
        """Read the next block, shuffle it if required, and cut it into batches.

        A reader of the whole stream reads its block size times the number of readers. So all
        readers seed their generators at the same positions, and a stream that draws its order gives
        all of them the same order.
        """
        if self._samples is None:
            self._open()
        block, size, name = self._block, self._readers.part.batch_size, self._readers.name
        position = {"block": block, "num_read": self._num_read, "num_taken": 0}
        self._position = {**position, **self._states}
        seed_generators(self._stream_seed("block", block))
        stride, offset = (1, 0) if self._is_sharded else (self._readers.count, self._number)
        samples, num_read, most = list[Any](), 0, self._readers.block_size * stride
        for number, sample in enumerate(islice(self._samples, most)):
            if number % stride == offset:
                samples.append(sample)
            num_read = number + 1
        if self._readers.is_shuffled:
            generator = torch.Generator().manual_seed(self._seed("shuffle", block))
            samples = [samples[i] for i in torch.randperm(len(samples), generator=generator)]
        self._ready = deque(samples[i : i + size] for i in range(0, len(samples), size))
        self._block, self._num_read = block + 1, self._num_read + num_read
        self._has_ended = num_read < most
        self._states = {"of_dataset": _state_of(self._dataset, name)}
        if self._samples is not self._dataset:
            self._states["of_iterator"] = _state_of(self._samples, name)

    def _open(self) -> None:
        """Start reading this reader's part of the epoch, or continue from the user's state."""
        seed_generators(self._stream_seed("start"))
        if self._is_sharded:
            count, number = self._readers.count, self._number
            self._dataset = self._dataset.shard(num_shards=count, index=number)
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(self._readers.part.epoch)
        # Copies, since the user's code may keep them and change them.
        if (state := self._states.get("of_dataset")) is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        self._samples = iter(self._dataset)
        if (state := self._states.get("of_iterator")) is not None:
            self._samples.load_state_dict(copy.deepcopy(state))

    def _seed(self, *labels: str | int) -> int:
        part = self._readers.part
        return derive(part.seed, self._readers.name, "reader", part.epoch, self._number, *labels)

    def _stream_seed(self, *labels: str | int) -> int:
        """Return a seed for the stream's own draws: equal for all readers of the same stream."""
        part, number = self._readers.part, self._number if self._is_sharded else 0
        return derive(part.seed, self._readers.name, "stream", part.epoch, number, *labels)


def _state_of(part: Any, name: str) -> Any:
    """Return a copy of the state of a dataset or an iterator, or None if it has no state."""
    if not all(hasattr(part, method) for method in ("state_dict", "load_state_dict")):
        return None
    state = copy.deepcopy(part.state_dict())
    for path, value in leaves(state, f"the state of the {name} stream"):
        if not isinstance(value, PLAIN):
            raise UserError(
                f"{path} is a {type(value).__name__}, which a checkpoint cannot hold",
                "return numbers, texts and tensors from its state_dict, in lists, tuples and dicts",
            )
    return state
