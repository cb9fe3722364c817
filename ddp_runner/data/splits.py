"""The samples of a training or an evaluation split, and how they become batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from ddp_runner.device import upload
from ddp_runner.errors import UserError

IGNORED = -100  # a target that torch's losses leave out by default
MOST_GPU_DATA = 2 * 2**30  # bytes; a split up to this size moves to the GPU as a whole
MOST_AHEAD, BYTES_AHEAD = 64, 2**18  # batches that are loaded in one go, and their bytes
NUM_FIRST = 2  # samples of an example batch; torch.compile would specialise on a size of 1


class MicroPlan(NamedTuple):
    """The samples of one forward, before they are loaded."""

    indices: Tensor | range  # int64 (batch,)
    epoch: int = 0
    weight: float = 1.0  # weight of each sample in the loss; 0.0: a placeholder
    randoms: Tensor | None = None  # (batch, num_randoms), uniform in [0, 1), for the augmentation

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self.indices) if isinstance(self.indices, range) else self.indices.numel()


class MicroBatch(NamedTuple):  # a DataLoader pins the tensors of a tuple
    """The samples of one forward and backward, on the split's device."""

    data: Any  # a tree of tensors (batch, ...); a TensorSplit gives (inputs, targets)
    num_samples: int
    weight: float = 1.0  # as in MicroPlan
    randoms: Tensor | None = None


@dataclass(frozen=True)
class EpochShare:
    """One share of an epoch."""

    batch_size: int
    share: int
    num_shares: int
    seed: int
    epoch: int = 0
    doubles_single: bool = False  # a stream repeats the sample of a batch of one


class NumberedSplit(ABC):
    """Samples that are numbered from 0; a subclass has ``__len__`` and ``load``."""

    @property
    def device(self) -> torch.device:
        """Return the device of the batches, and of the indices to load."""
        return torch.device("cpu")

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def load(self, plans: Iterable[MicroPlan], *, seed: int = 0) -> Iterator[Any]:
        """Yield the batch of each plan, a tree of tensors; `plans` may be read ahead.

        A sample's random numbers follow from the seed, its epoch and its index alone.

        Raises:
            UserError: a sample cannot be loaded.
        """

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self)

    def near(self, device: torch.device) -> Self:
        """Return the split prepared for a device; on a GPU if it has at most MOST_GPU_DATA."""
        return self

    def most_ahead(self, batch_size: int) -> int:
        """Return how many batches of this size are loaded in one go, if they are in memory.

        The code and the data of small batches then stay in the processor's caches.
        """
        return 1

    def first(self, numbers: Sequence[int] = range(NUM_FIRST), *, seed: int = 0) -> MicroBatch:
        """Return samples by their numbers; a number past the end gives the last sample."""
        indices = torch.tensor(numbers, device=self.device).clamp(max=len(self) - 1)
        (data,) = self.load([MicroPlan(indices)], seed=seed)
        return MicroBatch(data, num_samples=len(numbers))

    def in_order(self, part: EpochShare, *, takes_turns: bool = False) -> Iterator[MicroBatch]:
        """Yield the batches of one share; each sample is in exactly one share.

        A share is a contiguous part of the split. With `takes_turns` it is every ``num_shares``-th
        batch, so the batches are the same for any number of shares. Shares may get different
        numbers of batches, or none, so never call a collective inside this loop.
        """
        size, share, count = part.batch_size, part.share, part.num_shares
        begin, end = (len(self) * number // count for number in (share, share + 1))
        starts = range(begin, end, size)
        if takes_turns:
            starts, end = range(share * size, len(self), count * size), len(self)
        ranges = [range(start, min(start + size, end)) for start in starts]
        loaded = self.load(map(MicroPlan, ranges), seed=part.seed)
        for numbers, data in zip(ranges, loaded, strict=True):
            yield MicroBatch(data, num_samples=len(numbers))


@dataclass(frozen=True)
class AbsentSplit(NumberedSplit):
    """A split that the dataset lacks; any use of its samples raises the error `fix`."""

    fix: str
    num_samples = 0

    def load(self, *_: Any, **named: Any) -> NoReturn:
        """Raise the UserError."""
        raise UserError(self.fix)

    __len__ = load


@dataclass(frozen=True)
class TensorSplit(NumberedSplit):
    """Samples in two tensors, in memory or memory-mapped; a batch is (inputs, targets)."""

    inputs: Tensor  # (num_samples, ...); uint8 images: (num_samples, channels, height, width)
    targets: Tensor  # int64 classes (num_samples,), or floats (num_samples, ...)
    # Lengths of sequences on a GPU, (num_samples,), on the CPU so that reading them does not wait.
    # A batch is cut to its longest.
    ends: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the samples, or of their `ends`."""
        return (self.inputs if self.ends is None else self.ends).device

    def __len__(self) -> int:
        return len(self.inputs)

    def load(self, plans: Iterable[MicroPlan], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs (batch, ...) and targets (batch, ...) of each plan; ranges as views."""
        for plan in plans:
            if isinstance(plan.indices, range):
                rows: Any = slice(plan.indices.start, plan.indices.stop)
                inputs, targets = self.inputs[rows], self.targets[rows]
            else:
                # On the CPU index_select is six times as fast as inputs[indices].
                rows, near = plan.indices, upload(plan.indices, self.inputs.device)
                inputs = self.inputs.index_select(0, near)
                targets = self.targets.index_select(0, near)
            if self.ends is not None:
                inputs = inputs[:, : int(self.ends[rows].max())]
            yield inputs, targets

    def most_ahead(self, batch_size: int) -> int:
        """See ``NumberedSplit``."""
        sample_bytes = (self.inputs.nbytes + self.targets.nbytes) // max(1, len(self.inputs))
        return min(MOST_AHEAD, max(1, BYTES_AHEAD // max(1, sample_bytes * batch_size)))

    def near(self, device: torch.device) -> "TensorSplit":
        """See ``NumberedSplit``."""
        if device.type == "cpu" or self.inputs.nbytes + self.targets.nbytes > MOST_GPU_DATA:
            return self
        return TensorSplit(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class TokenSplit(NumberedSplit):
    """One long sequence of tokens, cut into samples of equal length; a batch is (inputs, targets).

    Sample i has tokens i * length to (i + 1) * length as inputs, and the same tokens shifted by one
    as targets. Each token but the first is a target once; an incomplete last sample is left out.
    """

    tokens: Tensor  # (num_tokens,), in memory or memory-mapped; int16 holds 0 to 65,535 unsigned
    length: int  # tokens of a sample

    @property
    def device(self) -> torch.device:
        """Return the device of the tokens."""
        return self.tokens.device

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def load(self, plans: Iterable[MicroPlan], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of each plan, both int64 (batch, length)."""
        windows = self.tokens.unfold(0, self.length + 1, self.length)  # a view
        for plan in plans:
            rows = plan.indices
            if isinstance(rows, range):
                tokens = windows[rows.start : rows.stop].long()
            else:
                tokens = windows.index_select(0, rows).long()
            if self.tokens.dtype == torch.int16:
                tokens &= 0xFFFF
            yield tokens[:, :-1], tokens[:, 1:]

    def near(self, device: torch.device) -> "TokenSplit":
        """See ``NumberedSplit``."""
        if device.type == "cpu" or self.tokens.nbytes > MOST_GPU_DATA:
            return self
        return TokenSplit(self.tokens.to(device), self.length)


def validate_classes(targets: Tensor, *, num_classes: int, subject: str = "targets") -> None:
    """Raise a ``UserError`` if targets are neither classes nor IGNORED, such as 255 for pixels."""
    if not targets.numel():
        return
    lowest, highest = map(int, torch.stack(targets.aminmax()).tolist())  # one transfer from a GPU
    if lowest == IGNORED:
        lowest = int(targets.where(targets != IGNORED, 0).min())
    if lowest < 0 or highest >= num_classes:
        raise UserError(
            f"{subject} go from {lowest} to {highest}",
            f"number {num_classes} classes from 0 to "
            f"{num_classes - 1}, and use {IGNORED} for a target to ignore",
        )
