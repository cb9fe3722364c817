"""The order of samples: the same global batches at every world size; train.py iterates them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_runner.data.dataset import Split
from ddp_runner.seeds import derive

# Of the order of samples: a run stopped amid an epoch of another order cannot finish the epoch.
ORDER_VERSION = 2
POOL_BATCHES = 50  # global batches within which sequences are sorted by length


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward, on the device of the split."""

    inputs: Tensor  # (batch, ...)
    targets: Tensor  # (batch,) or (batch, ...)
    weight: float = 1.0  # of each sample; 0.0: a placeholder, whose loss must not count
    randoms: Tensor | None = None  # (batch, num_randoms) for the augmentation, uniform in 0..1


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]  # as many on every rank, so that collectives match
    global_count: int  # samples of the global batch, over all ranks
    number: int  # of the batch, counted as if all epochs of the run had batches of this size


@dataclass(frozen=True)
class GlobalBatches:
    """One share of the global batches of a training split: in most modes a rank's.

    Global batch k of an epoch is the k-th slice of a permutation that depends on the seed and the
    epoch alone; the last one may be smaller. Share r is every ``num_shares``-th sample from r on,
    as with ``torch.utils.data.DistributedSampler``, without its padding.
    """

    split: Split
    global_size: int  # samples of an optimizer step, over all shares
    grad_accum_steps: int  # most micro-batches of a step
    share: int
    num_shares: int
    seed: int
    num_randoms: int = 0  # random numbers of a sample, for its augmentation
    lengths: Tensor | None = None  # (num_samples,): put samples of similar length together
    # At these places of the run, counted in batches, another batch: one that it left out before.
    instead: Mapping[int, int] = field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return math.ceil(len(self.split) / self.global_size)

    @property
    def micro_size(self) -> int:
        """Most samples of a micro-batch."""
        return math.ceil(self.global_size / (self.num_shares * self.grad_accum_steps))

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[StepBatch]:
        """The steps of an epoch from ``start_step`` on; those before it cost nothing."""
        order = self.order(epoch)
        for index in range(start_step, self.steps_per_epoch):
            other = self.instead.get(epoch * self.steps_per_epoch + index)
            if other is None:
                yield self.step(epoch, index, order=order)
            else:
                of_epoch, of_index = divmod(other, self.steps_per_epoch)
                yield self.step(of_epoch, of_index, order=self.order(of_epoch))

    def order(self, epoch: int) -> Tensor:
        """The epoch's order of all samples, int64 ``(num_samples,)``."""
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        order = torch.randperm(len(self.split), generator=generator)
        if self.lengths is not None:
            order = self._by_length(order, self.lengths, generator)
        return order.to(self.split.inputs.device)

    def step(self, epoch: int, index: int, *, order: Tensor) -> StepBatch:
        """This share of the epoch's global batch ``index``; ``order`` is the epoch's."""
        start = index * self.global_size
        global_batch = order[start : start + self.global_size]
        randoms = self._randoms(epoch, index, len(global_batch))
        share = slice(self.share, None, self.num_shares)
        largest_share = math.ceil(len(global_batch) / self.num_shares)
        num_pieces = math.ceil(largest_share / self.micro_size)
        pieces = zip(
            global_batch[share].tensor_split(num_pieces),
            randoms[share].tensor_split(num_pieces),
            strict=True,
        )
        micro_batches = tuple(
            # A share with one sample less may lack a piece; its peers wait for its backward.
            self._gather(piece, numbers)
            if len(piece)
            else self._gather(global_batch[:1], randoms[:1], weight=0.0)
            for piece, numbers in pieces
        )
        number = epoch * self.steps_per_epoch + index
        return StepBatch(micro_batches, global_count=len(global_batch), number=number)

    def _gather(self, indices: Tensor, randoms: Tensor, *, weight: float = 1.0) -> MicroBatch:
        if len(indices) == 1 and self.micro_size > 1:
            # What is left over may be a single sample, of which BatchNorm has no variance: twice
            # over, each counts half.
            indices, randoms, weight = indices.repeat(2), randoms.repeat(2, 1), weight / 2
        # index_select: on CPU six times as fast as inputs[indices].
        inputs = self.split.inputs.index_select(0, indices)
        targets = self.split.targets.index_select(0, indices)
        return MicroBatch(inputs, targets, weight, randoms if self.num_randoms else None)

    def _randoms(self, epoch: int, index: int, count: int) -> Tensor:
        """The step's random numbers, drawn for the whole global batch: every world size's alike."""
        if not self.num_randoms:
            return torch.empty(count, 0)
        seed = derive(self.seed, "augmentation", epoch, index)
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, self.num_randoms, generator=generator)

    def _by_length(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Sort by length within pools of batches, and shuffle the batches; a last part stays last.

        So a batch is padded little, and what is in it is still left to chance.
        """
        pools = order.split(POOL_BATCHES * self.global_size)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
        num_whole = len(order) // self.global_size
        whole = order[: num_whole * self.global_size].reshape(num_whole, self.global_size)
        shuffled = whole[torch.randperm(num_whole, generator=generator)].flatten()
        return torch.cat([shuffled, order[num_whole * self.global_size :]])


def eval_batches(
    split: Split, *, batch_size: int, rank: int, world_size: int
) -> Iterator[MicroBatch]:
    """One rank's contiguous part of a split, as views: each sample once over all ranks, no padding.

    Ranks may get different numbers of batches, a rank of a tiny split none: no collective inside
    the loop over them.
    """
    end = len(split) * (rank + 1) // world_size
    for start in range(len(split) * rank // world_size, end, batch_size):
        stop = min(start + batch_size, end)
        yield MicroBatch(split.inputs[start:stop], split.targets[start:stop])
