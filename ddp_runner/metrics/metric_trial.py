"""Tries metrics before the first step: a wrong one would end the run, or its ``merge`` mislead."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ddp_runner.data.trees import first_tensor
from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import ComputeError, Evaluation, Metric, title

Batch = tuple[Any, Any]  # the outputs and targets of a training step


def try_metrics(
    metrics: Mapping[str, Metric], *batches: Batch, device: torch.device
) -> tuple[set[str], set[str]]:
    """Return the names of the numbers that metrics compute, and the metrics that need more samples.

    One object takes in the two batches, and so do the objects of four ranks, of which two have none
    and the last has more than the others. Merged, they must compute the same; a metric that draws
    random numbers cannot be compared.

    Raises:
        UserError: a metric has no ``merge`` or a wrong one, cannot take a batch, or computes
            something else than numbers.
    """
    names, without = set[str](), set[str]()
    for name, metric in metrics.items():
        first, second = batches
        alone = [[first, second, second]]
        try:
            whole = _over(name, metric, alone, device)
        except ComputeError:
            without.add(name)
            continue
        names |= whole.keys()
        parts = _over(name, metric, [[], [first], [], [second, second]], device)
        key = _differing(whole, parts, like=first[0])
        if key and not _differing(whole, _over(name, metric, alone, device), like=first[0]):
            raise UserError(
                f"{title(name, metric)} depends on how many ranks there are: {key} is "
                f"{whole.get(key, math.nan):.6g} in one object and {parts.get(key, math.nan):.6g} "
                "merged from several; correct its merge(self, other), which must take in all that "
                "the other has"
            )
    return names, without


def _over(
    name: str, metric: Metric, by_rank: Sequence[Sequence[Batch]], device: torch.device
) -> dict[str, float]:
    """Return what a metric computes over ranks with these batches, all played by this one."""
    states = []
    for batches in by_rank:
        rank = Evaluation({name: metric}, device=device)  # one at a time: it may hold a network
        for outputs, targets in batches:
            rank.update(outputs, targets)
        states.append(rank.packed())
    return rank.over(states)


def _differing(whole: Mapping[str, float], parts: Mapping[str, float], *, like: Any) -> str | None:
    """Return the first number that differs by more than the rounding of outputs like these."""
    tensor, rounding = first_tensor(like), 1e-3  # far above that of float32
    if tensor is not None and tensor.is_floating_point():
        rounding = max(rounding, 8 * torch.finfo(tensor.dtype).eps)
    for key in [*whole, *parts]:
        one, other = whole.get(key, math.nan), parts.get(key, math.nan)
        if not np.isclose(other, one, rtol=rounding, atol=1e-6, equal_nan=True):
            return key
    return None
