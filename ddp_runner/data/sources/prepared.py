"""Loads all samples of a dataset once, into two tensors that later runs start with."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.loader import LoaderSplit
from ddp_runner.data.splits import MicroPlan, Split
from ddp_runner.data.trees import shape_of
from ddp_runner.errors import UserError
from ddp_runner.seeds import generator_states, moved

PREPARED_AT_ONCE = 256  # samples
FALSE = "write dataset.prepare=false"


def first_batch(split: Split) -> tuple[Any, bool]:
    """Return a batch of the first sample, and whether that draws random numbers."""
    if not isinstance(split, LoaderSplit):
        raise UserError(getattr(split, "fix", f"a stream has no samples to prepare; {FALSE}"))
    before = generator_states()
    batch = next(replace(split, num_workers=0).load([MicroPlan(range(1))]))
    return batch, bool(moved(before))


def prepared(split: Split, room: float) -> list[Tensor]:
    """Return the inputs and the targets of a split, each in one tensor; `room` is in bytes."""
    first, draws = first_batch(split)
    assert isinstance(split, LoaderSplit)
    if draws:
        raise UserError(
            f"the {split.name} samples draw random numbers, and prepared they would be the same in "
            f"each epoch; {FALSE}, or leave that to dataset.augmentation"
        )
    is_pair = isinstance(first, list | tuple) and len(first) == 2
    if not is_pair or not all(isinstance(one, Tensor) for one in first):
        raise UserError(
            f"a {split.name} sample becomes a batch of type {type(first).__name__}, and only pairs "
            f"of tensors (input, target) are prepared; {FALSE}"
        )
    needed = sum(one.nbytes for one in first) * len(split)
    if needed > room:
        raise UserError(
            f"the {len(split):,} {split.name} samples take {needed / 2**30:.1f} GiB, and half of "
            f"the memory leaves {room / 2**30:.1f} GiB; {FALSE}, or make them smaller"
        )
    whole = [torch.empty((len(split), *one.shape[1:]), dtype=one.dtype) for one in first]
    starts = range(0, len(split), PREPARED_AT_ONCE)
    plans = [MicroPlan(range(start, min(start + PREPARED_AT_ONCE, len(split)))) for start in starts]
    for start, batch in zip(starts, split.load(plans), strict=True):
        for tensor, part in zip(whole, batch, strict=True):
            if (part.shape[1:], part.dtype) != (tensor.shape[1:], tensor.dtype):
                raise UserError(
                    f"the {split.name} samples from {start} on are {shape_of(part[0])}, and the "
                    f"first {shape_of(tensor[0])}; let all be alike, or {FALSE}"
                )
            tensor[start : start + len(part)] = part
    return whole
