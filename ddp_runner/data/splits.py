"""The samples of a training or an evaluation split, and how they become batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ddp_runner.device import upload
from ddp_runner.errors import UserError

IGNORED = -100  # a target that torch's losses leave out by default
# In bytes: a split up to this size moves to each GPU once, not batch by batch.
MOST_GPU_DATA = 2 * 2**30


@dataclass(frozen=True)
class Piece:
    """The samples of one forward: which ones, and in which epoch."""

    indices: Tensor | range  # int64 (batch,)
    epoch: int = 0


class Split(Protocol):
    """Samples that are numbered from 0, wherever they are."""

    @property
    def device(self) -> torch.device:
        """Return where its batches are, and where indices are best."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def load(self, pieces: Iterable[Piece], *, seed: int) -> Iterator[Any]:
        """Yield the batch of each piece, a tree of tensors; it may read ahead.

        A sample's random numbers follow from the seed, its epoch and its index alone.

        Raises:
            UserError: a sample cannot be loaded.
        """

    def near(self, device: torch.device, *, most_bytes: float) -> "Split":
        """Return the split on a GPU if it has at most so many bytes, else as it is."""


@dataclass(frozen=True)
class AbsentSplit:
    """A split that a dataset does not give; what needs its samples raises, and says the `fix`."""

    fix: str
    device = torch.device("cpu")

    def load(self, *_: Any, **named: Any) -> NoReturn:
        """Raise the UserError."""
        raise UserError(self.fix)

    __len__ = load

    def near(self, device: torch.device, *, most_bytes: float) -> "AbsentSplit":
        """Return it."""
        return self


@dataclass(frozen=True)
class TensorSplit:
    """Samples in two tensors, in memory or memory-mapped; a batch is (inputs, targets)."""

    inputs: Tensor  # (num_samples, ...); uint8 images: (num_samples, channels, height, width)
    targets: Tensor  # int64 classes (num_samples,), or floats (num_samples, ...)
    # Of sequences on a GPU, which would wait to be asked: where each ends, (num_samples,) on the
    # CPU. A batch is cut after its longest.
    ends: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Return where indices are best: on the device of the samples, or with their ends."""
        return (self.inputs if self.ends is None else self.ends).device

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def load(self, pieces: Iterable[Piece], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs (batch, ...) and targets (batch, ...) of each piece.

        The samples of a range are views.
        """
        for piece in pieces:
            if isinstance(piece.indices, range):
                rows: Any = slice(piece.indices.start, piece.indices.stop)
                inputs, targets = self.inputs[rows], self.targets[rows]
            else:
                # On the CPU index_select is six times as fast as inputs[indices].
                rows, near = piece.indices, upload(piece.indices, self.inputs.device)
                inputs, targets = (one.index_select(0, near) for one in (self.inputs, self.targets))
            if self.ends is not None:
                inputs = inputs[:, : int(self.ends[rows].max())]
            yield inputs, targets

    def near(self, device: torch.device, *, most_bytes: float) -> "TensorSplit":
        """Return the split on a GPU if it is small enough, else as it is."""
        if device.type == "cpu" or self.inputs.nbytes + self.targets.nbytes > most_bytes:
            return self
        return TensorSplit(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class TokenSplit:
    """One long sequence of tokens, cut into samples of equal length; a batch is (inputs, targets).

    Sample i has tokens i * length to (i + 1) * length as inputs, and as targets the same tokens
    moved by one. So each token but the first is a target once; at the end less than a sample is
    left out.
    """

    tokens: Tensor  # (num_tokens,), in memory or memory-mapped; int16 holds 0 to 65,535 unsigned
    length: int  # tokens of a sample

    @property
    def device(self) -> torch.device:
        """Return the device of the tokens."""
        return self.tokens.device

    def __len__(self) -> int:
        """Return the number of samples."""
        return max(0, len(self.tokens) - 1) // self.length

    def load(self, pieces: Iterable[Piece], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and the targets of each piece, both int64 (batch, length)."""
        windows = self.tokens.unfold(0, self.length + 1, self.length)  # a view
        for piece in pieces:
            rows = torch.as_tensor(piece.indices, device=self.device)
            tokens = windows.index_select(0, rows).long()
            if self.tokens.dtype == torch.int16:
                tokens &= 0xFFFF
            yield tokens[:, :-1], tokens[:, 1:]

    def near(self, device: torch.device, *, most_bytes: float) -> "TokenSplit":
        """Return the split on a GPU if it is small enough, else as it is."""
        if device.type == "cpu" or self.tokens.nbytes > most_bytes:
            return self
        return TokenSplit(self.tokens.to(device), self.length)


def validate_classes(targets: Tensor, *, num_classes: int, subject: str = "targets") -> None:
    """Reject targets that are neither classes nor -100, such as 255 for what does not count.

    Raises:
        UserError: a target is not a class; the message names the `subject`.
    """
    if not targets.numel():
        return
    lowest, highest = map(int, torch.stack(targets.aminmax()).tolist())  # a GPU waits once
    if lowest == IGNORED:
        lowest = int(targets.where(targets != IGNORED, 0).min())
    if lowest < 0 or highest >= num_classes:
        raise UserError(
            f"{subject} go from {lowest} to {highest}; {num_classes} classes are numbered from 0 "
            f"to {num_classes - 1}, and {IGNORED} is a target that does not count"
        )
