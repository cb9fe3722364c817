"""The steps of an epoch by its number, wherever the batches stand."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ddp_runner.data.batches import Batches, NumberedBatches, StepBatch
from ddp_runner.data.splits import TensorSplit


def steps_of(batches: Batches, epoch: int = 0, *, start: int = 0) -> Iterator[StepBatch]:
    """Yield the steps of an epoch, from `start` on; the batches stay where they are."""
    ours = replace(batches)
    ours.epoch, ours.step = epoch, start
    for step in ours:
        yield step
        if step.is_last:
            return


def samples_of(batches: NumberedBatches, epoch: int) -> Tensor:
    """Return the numbers of an epoch's samples in their order, int64 (num_samples,)."""
    numbers = torch.arange(len(batches.split))
    whole = replace(
        batches, split=TensorSplit(numbers, numbers), share=0, num_shares=1, grad_accum_steps=1
    )
    parts = [step.micro_batches[0] for step in steps_of(whole, epoch)]
    # A single one at the end comes twice with half the weight.
    return torch.cat([one.data[0][: round(one.num_samples * one.weight)] for one in parts])
