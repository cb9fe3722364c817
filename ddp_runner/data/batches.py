"""The order of samples: the same global batches at every world size; train.py iterates them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_runner.data.source import Split


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward, on the device of the split."""

    inputs: Tensor  # (batch, ...)
    targets: Tensor  # (batch,) or (batch, ...)
    weight: float = 1.0  # 0.0: a placeholder, whose loss must not count


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]  # as many on every rank, so that collectives match
    global_count: int  # samples of the global batch, over all ranks


@dataclass(frozen=True)
class GlobalBatches:
    """One rank's share of the global batches of a training split.

    Global batch k of an epoch is the k-th slice of a permutation that depends on the seed and the
    epoch alone; the last one may be smaller. Rank r takes every ``world_size``-th sample from r on,
    which is the order of ``torch.utils.data.DistributedSampler(seed=seed)``, without its padding.
    """

    split: Split
    global_size: int  # samples of an optimizer step, over all ranks
    grad_accum_steps: int  # most micro-batches of a step
    rank: int
    world_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return math.ceil(len(self.split) / self.global_size)

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[StepBatch]:
        """The steps of an epoch from ``start_step`` on; those before it cost nothing."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.split), generator=generator).to(self.split.inputs.device)
        for start in range(start_step * self.global_size, len(order), self.global_size):
            global_batch = order[start : start + self.global_size]
            share = global_batch[self.rank :: self.world_size]
            largest_share = math.ceil(len(global_batch) / self.world_size)
            pieces = share.tensor_split(min(self.grad_accum_steps, largest_share))
            micro_batches = tuple(
                # A rank with one sample less may lack a piece; its peers wait for its backward.
                self._gather(piece) if len(piece) else self._gather(global_batch[:1], weight=0.0)
                for piece in pieces
            )
            yield StepBatch(micro_batches, global_count=len(global_batch))

    def _gather(self, indices: Tensor, *, weight: float = 1.0) -> MicroBatch:
        # index_select: on CPU six times as fast as inputs[indices].
        inputs = self.split.inputs.index_select(0, indices)
        return MicroBatch(inputs, self.split.targets.index_select(0, indices), weight)


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
