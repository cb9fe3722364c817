"""Checks that the data are split over ranks without loss or overlap.

Collective: every rank must call each check, and gets the same finding.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.check.compare_ranks import Finding, differences, format_differences
from ddp_runner.data.batches import eval_batches
from ddp_runner.data.dataset import Split
from ddp_runner.train.state import TrainState

MOST_BYTES = 16 * 2**20  # of a split's inputs that are compared over ranks


def same_data(state: TrainState) -> Finding:
    """Check that all ranks hold the same samples; of a large split only evenly spaced ones."""
    tensors = dict[str, Tensor | None]()
    for name, split in (("train", state.setup.batches.split), ("eval", state.setup.dataset.eval)):
        stride = max(1, math.ceil(split.inputs.nbytes / MOST_BYTES))
        tensors |= {f"{name} inputs": split.inputs[::stride], f"{name} targets": split.targets}
    differing = differences(tensors)
    train, evaluation = state.setup.batches.split, state.setup.dataset.eval
    sizes = f"{len(train)} train and {len(evaluation)} eval samples"
    return Finding(
        "all ranks hold the same data", not differing, format_differences(differing) or sizes
    )


def train_samples(state: TrainState) -> Finding:
    """Check that the ranks' micro-batches use each training sample once in an epoch."""
    batches = replace(state.setup.batches, split=_numbered(state.setup.batches.split))
    counts = torch.zeros(len(batches.split), dtype=torch.float64)
    most = 0
    for step in batches.epoch(0):
        most = max(most, len(step.micro_batches))
        for batch in step.micro_batches:
            weights = torch.full((len(batch.targets),), batch.weight, dtype=counts.dtype)
            counts.index_add_(0, batch.targets, weights)
    how = f"in {batches.steps_per_epoch} steps x {batches.num_shares} ranks x {most} micro-batches"
    return _tally("each training sample is used once an epoch", counts, how)


def eval_samples(state: TrainState) -> Finding:
    """Check that the ranks' evaluation batches hold each sample once."""
    numbered = _numbered(state.setup.dataset.eval)
    counts = torch.zeros(len(numbered), dtype=torch.int64)
    for batch in eval_batches(
        numbered,
        batch_size=state.setup.eval_batch_size,
        rank=state.setup.env.rank,
        world_size=state.setup.env.world_size,
    ):
        counts.index_add_(0, batch.targets, torch.ones_like(batch.targets))
    how = f"in batches of up to {state.setup.eval_batch_size} on {state.setup.env.world_size} ranks"
    return _tally("each evaluation sample counts once", counts, how)


def _numbered(split: Split) -> Split:
    """Return a split of the same length in which each sample is its own index."""
    numbers = torch.arange(len(split))
    return Split(numbers, numbers)


def _tally(name: str, counts: Tensor, how: str) -> Finding:
    """Return whether the counts of all ranks add up to 1 per sample."""
    dist.all_reduce(counts)
    missed, repeated = (counts == 0).nonzero().flatten(), (counts > 1).nonzero().flatten()
    faults = [
        f"{len(samples)} are {what} (the first is sample {int(samples[0])})"
        for samples, what in ((missed, "in no batch"), (repeated, "in several"))
        if len(samples)
    ]
    if faults:
        return Finding(name, False, f"of {len(counts)} samples {' and '.join(faults)}, {how}")
    return Finding(name, True, f"{len(counts)} {how}")
