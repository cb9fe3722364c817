"""Checks that the data are split over ranks without loss or overlap.

Collective: every rank must call each check, and gets the same finding.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.check.compare_ranks import Finding, equality
from ddp_runner.data.batches import NumberedBatches
from ddp_runner.data.splits import MicroBatch, Part, Split, TensorSplit
from ddp_runner.data.trees import tensors_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import counted
from ddp_runner.train.state import TrainState

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
        else:
            last = (split.num_samples or MOST_LOADED) - 1
            numbers = torch.linspace(0, last, MOST_LOADED).long().unique().tolist()
            data = split.first(numbers, seed=state.setup.config.seed).data
        tensors |= {f"{name} {place}": tensor for place, tensor in tensors_of(data)}
    sizes = f"{_size(train)} train and {_size(evaluation)} eval samples"
    return equality("all ranks hold the same data", tensors, sizes)


def train_samples(state: TrainState) -> Finding:
    """Check that the shares' micro-batches use each training sample once in an epoch."""
    batches, name = state.setup.batches, "each training sample is used once an epoch"
    if not isinstance(batches, NumberedBatches):
        return Finding(name, True, WITHOUT_NUMBERS)
    batches = replace(batches, split=_numbered(len(batches.split)))
    steps = [step.micro_batches for step in islice(batches, batches.steps_per_epoch)]
    how = (
        f"in {batches.steps_per_epoch} steps x {_shares(state, batches.num_shares)} x "
        f"{max(map(len, steps), default=0)} micro-batches"
    )
    parts = [part for step in steps for part in step]
    return _tally(name, len(batches.split), parts, how, state)


def eval_samples(state: TrainState) -> Finding:
    """Check that the shares' evaluation batches hold each sample once."""
    split, name = state.setup.dataset.eval, "each evaluation sample counts once"
    if split.num_samples is None:
        return Finding(name, True, WITHOUT_NUMBERS)
    numbered, size = _numbered(split.num_samples), state.setup.eval_batch_size
    share, num_shares = state.setup.layout.eval_share
    parts = numbered.in_order(Part(size, share, num_shares, seed=0))
    how = f"in batches of up to {size} on {_shares(state, num_shares)}"
    return _tally(name, len(numbered), parts, how, state)


def _shares(state: TrainState, num_shares: int) -> str:
    model_ranks = state.setup.layout.model_ranks
    if model_ranks == 1:
        return f"{num_shares} ranks"
    return f"{counted(num_shares, 'share')} of {model_ranks} ranks each"


def _size(split: Split) -> str:
    count = split.num_samples
    return f"the first {MOST_LOADED}" if count is None else str(count)


def _numbered(num_samples: int) -> TensorSplit:
    """Return a split in which each sample is its own index."""
    numbers = torch.arange(num_samples)
    return TensorSplit(numbers, numbers)


def _tally(
    name: str, num_samples: int, batches: Iterable[MicroBatch], how: str, state: TrainState
) -> Finding:
    """Return whether the weights of each sample in all shares' batches add up to 1.

    The ranks that compute one share together must have the same batches.
    """
    counts, digest = torch.zeros(num_samples, dtype=torch.float64), hashlib.blake2b()
    for batch in batches:
        numbers, _ = batch.data
        weights = torch.full((len(numbers),), batch.weight, dtype=counts.dtype)
        counts.index_add_(0, numbers, weights)
        digest.update(f"{numbers.tolist()} {batch.weight}".encode())
    digests, size = gather_objects(digest.hexdigest()), state.setup.layout.model_ranks
    for rank, one in enumerate(digests):
        if one != digests[first := rank - rank % size]:
            detail = f"rank {rank} has other batches than rank {first}, and both compute one share"
            return Finding(name, False, f"{detail}, {how}")
    dist.all_reduce(counts, group=state.setup.data_group)
    missed, repeated = (counts == 0).nonzero().flatten(), (counts > 1).nonzero().flatten()
    faults = [
        f"{len(samples)} are {what} (the first is sample {int(samples[0])})"
        for samples, what in ((missed, "in no batch"), (repeated, "in several"))
        if len(samples)
    ]
    if faults:
        return Finding(name, False, f"of {num_samples} samples {' and '.join(faults)}, {how}")
    return Finding(name, True, f"{num_samples} {how}")
