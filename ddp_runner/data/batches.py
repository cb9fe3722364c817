"""The order of samples: the same global batches at every world size and in every mode."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, tee
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.splits import Piece, Split
from ddp_runner.data.stream_reader import Part
from ddp_runner.data.streams import AnySplit, StreamSplit
from ddp_runner.seeds import derive

ORDER_VERSION = 2  # of the order of samples; a run cannot resume inside an epoch of another order
# Samples of a batch that stands for the others: one alone would be fixed in a program.
NUM_FIRST = 2
POOL_BATCHES = 50  # global batches within which sequences are sorted by length


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward, on the split's device."""

    data: Any  # a tree of tensors (batch, ...); of a TensorSplit the pair inputs, targets
    num_samples: int
    weight: float = 1.0  # of each sample in the loss; 0.0: a placeholder that must not count
    randoms: Tensor | None = None  # (batch, num_randoms), uniform in [0, 1), for the augmentation


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]  # equally many on every rank: collectives match
    global_count: int  # samples of the global batch, over all ranks
    number: int  # the batch's index in the run, as if all epochs had batches of this size
    is_last: bool = False  # of its epoch; known only to who asks for a whole epoch


@dataclass(frozen=True)
class GlobalBatches:
    """One share of a training split's global batches; in most modes each rank has one share.

    Global batch k of an epoch is the k-th slice of a permutation that depends only on the seed and
    the epoch, or of the dataset's own order; the last batch may be smaller. Share r is every
    ``num_shares``-th sample from r on, as in ``torch.utils.data.DistributedSampler``, but without
    its padding.
    """

    split: Split
    global_size: int  # samples of an optimizer step, over all shares
    grad_accum_steps: int  # most micro-batches of a step
    share: int
    num_shares: int
    seed: int
    is_computed: bool = True  # false: by other ranks, so the steps come without data
    num_randoms: int = 0  # random numbers per sample, for the augmentation
    shuffle: bool = True  # in another order in each epoch
    lengths: Tensor | None = None  # (num_samples,): put samples of similar length in one batch

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of an epoch."""
        return math.ceil(len(self.split) / self.global_size)

    @property
    def micro_size(self) -> int:
        """Return the most samples of a micro-batch."""
        return math.ceil(self.global_size / (self.num_shares * self.grad_accum_steps))

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[StepBatch]:
        """Yield the steps of an epoch from ``start_step`` on; skipped steps cost nothing."""
        plans, ahead = tee(self._plans(epoch, start_step))
        # The split may load more than a step ahead.
        pieces = (part.piece for plan in ahead for part in plan.parts)
        loaded = self.split.load(pieces, seed=self.seed)
        for index, plan in enumerate(plans, start=start_step):
            is_last = index == self.steps_per_epoch - 1
            yield plan.batch([next(loaded) for _ in plan.parts], is_last=is_last)

    def step(self, epoch: int, index: int, *, order: Tensor) -> StepBatch:
        """Return this share of the epoch's global batch ``index``; ``order`` is the epoch's."""
        plan = self._plan(epoch, index, order=order)
        return plan.batch(self.split.load([part.piece for part in plan.parts], seed=self.seed))

    def _plans(self, epoch: int, start_step: int) -> Iterator["_Plan"]:
        order = self.order(epoch)
        for index in range(start_step, self.steps_per_epoch):
            yield self._plan(epoch, index, order=order)

    def order(self, epoch: int) -> Tensor:
        """Return the indices of all samples in the epoch's order, int64 ``(num_samples,)``."""
        if not self.shuffle:
            return torch.arange(len(self.split), device=self.split.device)
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        order = torch.randperm(len(self.split), generator=generator)
        if self.lengths is not None:
            order = self._by_length(order, self.lengths, generator)
        return order.to(self.split.device)

    def _plan(self, epoch: int, index: int, *, order: Tensor) -> "_Plan":
        global_batch = order[index * self.global_size : (index + 1) * self.global_size]
        number = epoch * self.steps_per_epoch + index
        if not self.is_computed:
            return _Plan((), global_count=len(global_batch), number=number)
        share = slice(self.share, None, self.num_shares)
        largest_share = math.ceil(len(global_batch) / self.num_shares)
        num_pieces = math.ceil(largest_share / self.micro_size)
        pieces = global_batch[share].tensor_split(num_pieces)
        first: Tensor | None = None
        randoms: Iterable[Tensor | None] = repeat(None, num_pieces)
        if self.num_randoms:
            # Drawn for the whole global batch, so they are the same at every world size.
            numbers = torch.Generator().manual_seed(derive(self.seed, "augmentation", epoch, index))
            drawn = torch.rand(len(global_batch), self.num_randoms, generator=numbers)
            first, randoms = drawn[:1], drawn[share].tensor_split(num_pieces)
        parts = tuple(
            # A share with one sample fewer may lack a piece. The other ranks wait for its backward,
            # so it computes a placeholder.
            self._part(epoch, piece, its_randoms)
            if len(piece)
            else self._part(epoch, global_batch[:1], first, weight=0.0)
            for piece, its_randoms in zip(pieces, randoms, strict=True)
        )
        return _Plan(parts, global_count=len(global_batch), number=number)

    def _part(
        self, epoch: int, indices: Tensor, randoms: Tensor | None, *, weight: float = 1.0
    ) -> "_Part":
        if len(indices) == 1 and self.micro_size > 1:
            # The last piece may be a single sample, which BatchNorm refuses in training: take it
            # twice with half the weight.
            indices, weight = indices.repeat(2), weight / 2
            randoms = None if randoms is None else randoms.repeat(2, 1)
        return _Part(Piece(indices, epoch), weight, randoms)

    def _by_length(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Sort by length within pools of batches, then shuffle all batches but a smaller last one.

        Batches need little padding this way, and their composition stays random.
        """
        pools = order.split(POOL_BATCHES * self.global_size)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
        num_whole = len(order) // self.global_size
        whole = order[: num_whole * self.global_size].reshape(num_whole, self.global_size)
        shuffled = whole[torch.randperm(num_whole, generator=generator)].flatten()
        return torch.cat([shuffled, order[num_whole * self.global_size :]])


@dataclass(frozen=True)
class _Part:
    """A micro-batch that is not loaded yet."""

    piece: Piece
    weight: float
    randoms: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """A step that is not loaded yet."""

    parts: tuple[_Part, ...]
    global_count: int
    number: int

    def batch(self, loaded: Iterable[Any], *, is_last: bool = False) -> StepBatch:
        """Return the step with the data of its parts."""
        micro_batches = tuple(
            MicroBatch(data, len(part.piece.indices), part.weight, part.randoms)
            for part, data in zip(self.parts, loaded, strict=True)
        )
        return StepBatch(
            micro_batches, global_count=self.global_count, number=self.number, is_last=is_last
        )


def first_batch(
    split: AnySplit, numbers: Sequence[int] = range(NUM_FIRST), *, seed: int
) -> MicroBatch:
    """Return a split's first samples, or others by their numbers; past the end it is the last."""
    if isinstance(split, StreamSplit):
        return MicroBatch(split.first(numbers), num_samples=len(numbers))
    piece = Piece(torch.tensor(numbers, device=split.device).clamp(max=len(split) - 1))
    (data,) = split.load([piece], seed=seed)
    return MicroBatch(data, num_samples=len(numbers))


def eval_batches(
    split: AnySplit, *, batch_size: int, rank: int, world_size: int, seed: int
) -> Iterator[MicroBatch]:
    """Yield one rank's part of a split: each sample once over all ranks.

    The part is contiguous, unless the split is a stream.

    Ranks may get different numbers of batches, or none, so never call a collective inside the loop
    over them.
    """
    if isinstance(split, StreamSplit):
        for one in split.open(Part(batch_size, rank=rank, num_ranks=world_size, seed=seed)):
            yield MicroBatch(one.data, one.num_samples)
        return
    end = len(split) * (rank + 1) // world_size
    ranges = [
        range(start, min(start + batch_size, end))
        for start in range(len(split) * rank // world_size, end, batch_size)
    ]
    for part, data in zip(ranges, split.load(map(Piece, ranges), seed=seed), strict=True):
        yield MicroBatch(data, num_samples=len(part))
