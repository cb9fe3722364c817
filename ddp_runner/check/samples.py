"""Checks that the data are split over ranks without loss or overlap.

Collective: every rank must call each check, and gets the same finding.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.check.compare_ranks import Finding, equality
from ddp_runner.data.batches import MicroBatch, eval_batches
from ddp_runner.data.splits import Piece, Split, TensorSplit
from ddp_runner.data.streams import AnySplit, StreamSplit, num_samples
from ddp_runner.data.trees import tensors_of
from ddp_runner.train.state import TrainState
from ddp_runner.train.stream_batches import StreamBatches

MOST_BYTES = 16 * 2**20  # of a split's inputs that are compared over ranks
MOST_LOADED = 64  # samples of a split that must be loaded one by one
WITHOUT_NUMBERS = "not checked: the samples of a stream have no numbers"


def same_data(state: TrainState) -> Finding:
    """Check that all ranks hold the same samples.

    Of a large split these are only evenly spaced ones, of a stream the first ones.
    """
    train, evaluation = state.setup.batches.split, state.setup.dataset.eval
    tensors = dict[str, Tensor | None]()
    for name, split in (("train", train), ("eval", evaluation)):
        if isinstance(split, TensorSplit):
            stride = max(1, math.ceil(split.inputs.nbytes / MOST_BYTES))
            data: Any = {"inputs": split.inputs[::stride], "targets": split.targets}
        elif isinstance(split, StreamSplit):
            data = split.first(range(MOST_LOADED))
        else:
            piece = Piece(torch.linspace(0, len(split) - 1, MOST_LOADED).long().unique())
            (data,) = split.load([piece], seed=state.setup.config.seed)
        tensors |= {f"{name} {place}": tensor for place, tensor in tensors_of(data)}
    sizes = f"{_size(train)} train and {_size(evaluation)} eval samples"
    return equality("all ranks hold the same data", tensors, sizes)


def train_samples(state: TrainState) -> Finding:
    """Check that the ranks' micro-batches use each training sample once in an epoch."""
    batches, name = state.setup.batches, "each training sample is used once an epoch"
    if isinstance(batches, StreamBatches):
        return Finding(name, True, WITHOUT_NUMBERS)
    batches = replace(batches, split=_numbered(batches.split))
    steps = [step.micro_batches for step in batches.epoch(0)]
    how = (
        f"in {batches.steps_per_epoch} steps x {batches.num_shares} ranks x "
        f"{max(map(len, steps), default=0)} micro-batches"
    )
    parts = [part for step in steps for part in step]
    return _tally(name, len(batches.split), parts, how)


def eval_samples(state: TrainState) -> Finding:
    """Check that the ranks' evaluation batches hold each sample once."""
    split, name = state.setup.dataset.eval, "each evaluation sample counts once"
    if isinstance(split, StreamSplit):
        return Finding(name, True, WITHOUT_NUMBERS)
    numbered, size, env = _numbered(split), state.setup.eval_batch_size, state.setup.env
    parts = eval_batches(
        numbered, batch_size=size, rank=env.rank, world_size=env.world_size, seed=0
    )
    how = f"in batches of up to {size} on {env.world_size} ranks"
    return _tally(name, len(numbered), parts, how)


def _size(split: AnySplit) -> str:
    count = num_samples(split)
    return f"the first {MOST_LOADED}" if count is None else str(count)


def _numbered(split: Split) -> TensorSplit:
    """Return a split of the same length in which each sample is its own index."""
    numbers = torch.arange(len(split))
    return TensorSplit(numbers, numbers)


def _tally(name: str, num_samples: int, batches: Iterable[MicroBatch], how: str) -> Finding:
    """Return whether the weights of each sample in all ranks' batches add up to 1."""
    counts = torch.zeros(num_samples, dtype=torch.float64)
    for batch in batches:
        numbers, _ = batch.data
        weights = torch.full((len(numbers),), batch.weight, dtype=counts.dtype)
        counts.index_add_(0, numbers, weights)
    dist.all_reduce(counts)
    missed, repeated = (counts == 0).nonzero().flatten(), (counts > 1).nonzero().flatten()
    faults = [
        f"{len(samples)} are {what} (the first is sample {int(samples[0])})"
        for samples, what in ((missed, "in no batch"), (repeated, "in several"))
        if len(samples)
    ]
    if faults:
        return Finding(name, False, f"of {num_samples} samples {' and '.join(faults)}, {how}")
    return Finding(name, True, f"{num_samples} {how}")
