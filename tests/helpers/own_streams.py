"""Streams of a user's own, right and wrong, for configs to name. Sample i is (features, [i])."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from ddp_runner.train.step import StepOutput

FEATURES = 4
Sample = tuple[Tensor, Tensor]


def sample_of(number: int, *, noise: float = 0.0) -> Sample:
    """Return a sample's features (4,) and its number (1,), both float32."""
    generator = torch.Generator().manual_seed(number)
    features = torch.rand(FEATURES, generator=generator)
    return features + noise, torch.tensor([float(number)])


class Plain(IterableDataset[Sample]):
    """Samples from a generator, without a state. It draws a number for each of them."""

    def __init__(self, size: int | None, *, draws: bool = True) -> None:
        self.size, self.draws = size, draws

    def __iter__(self) -> Iterator[Sample]:
        # Most datasets do so; here it would leave out samples that others have split already.
        worker = get_worker_info()
        number, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.size is None or number < self.size:
            noise = random.random() + float(torch.rand(())) if self.draws else 0.0
            yield sample_of(number, noise=noise)
            number += step


class InDrawnOrder(Plain):
    """The same samples, in an order that the stream itself draws, with a buffer of its own."""

    def __iter__(self) -> Iterator[Sample]:
        numbers = list(range(self.size or 0))
        random.shuffle(numbers)
        waiting = list[int]()
        for number in numbers:
            waiting.append(number)
            if len(waiting) > 3:
                yield sample_of(waiting.pop(random.randrange(len(waiting))))
        for number in waiting:
            yield sample_of(number)


class Stateful(Plain):
    """The same samples, with the number of the next one as its state."""

    next_number = 0

    def __iter__(self) -> Iterator[Sample]:
        while self.size is None or self.next_number < self.size:
            self.next_number += 1  # before the yield: the state is that after the sample
            noise = random.random() + float(torch.rand(())) if self.draws else 0.0
            yield sample_of(self.next_number - 1, noise=noise)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next sample."""
        return {"place": {"next": self.next_number, "of": [self.size]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a sample."""
        self.next_number = state["place"].pop("next")


class Counting:
    """An iterator with a state of its own, as torchdata's protocol allows."""

    def __init__(self, size: int) -> None:
        self.size, self.number = size, 0

    def __iter__(self) -> "Counting":
        return self

    def __next__(self) -> Sample:
        if self.number == self.size:
            raise StopIteration
        self.number += 1
        return sample_of(self.number - 1, noise=random.random())

    def state_dict(self) -> dict[str, int]:
        """Return the number of samples so far."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after as many samples."""
        self.number = state["number"]


class WithIterator(IterableDataset[Sample]):
    """A stream whose iterator has the state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Counting:
        return Counting(self.size)


class Sharded(IterableDataset[Sample]):
    """Files of unequal sizes: part i of them has the files i, i + n, ..."""

    def __init__(self, sizes: list[int], files: list[int] | None = None) -> None:
        self.sizes, self.files = sizes, list(range(len(sizes))) if files is None else files
        self.epoch = 0

    @property
    def num_shards(self) -> int:
        """Return the number of files."""
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "Sharded":
        """Return a part."""
        return Sharded(self.sizes, self.files[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        """Let each epoch begin with another file."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        turn = self.epoch % max(1, len(self.files))
        for file in self.files[turn:] + self.files[:turn]:
            for number in range(sum(self.sizes[:file]), sum(self.sizes[: file + 1])):
                yield sample_of(number, noise=random.random())


class Broken(Plain):
    """Samples that end with a bug."""

    def __iter__(self) -> Iterator[Sample]:
        yield from super().__iter__()
        raise KeyError("image")


class Once(Plain):
    """A stream that can be read only once: later epochs are empty."""

    def __init__(self, size: int, folder: str) -> None:
        super().__init__(size)
        self.folder = folder

    def __iter__(self) -> Iterator[Sample]:
        if not Path(self.folder, "read").exists():
            yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Note that the first epoch is over."""
        if epoch:
            Path(self.folder, "read").touch()


class NotPlain(Stateful):
    """A stream whose state a checkpoint cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        """Return a set."""
        return {"seen": {1, 2}}


class NotCopied(Plain):
    """A stream that holds what cannot be copied."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = threading.Lock()


def numbered(model: nn.Module, batch: Sample) -> StepOutput:
    """Return the squared outputs, and as scalars what tells which samples were in the batch."""
    features, numbers = batch
    outputs = model(features)
    scalars = {"numbers": numbers.double().sum(), "squares": numbers.double().square().sum()}
    return StepOutput(outputs.square().sum(), len(numbers), outputs, numbers, scalars)
