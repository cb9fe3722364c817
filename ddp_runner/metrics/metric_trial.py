"""Tries metrics before the first step: a wrong ``merge`` would give wrong numbers later."""

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
    """Return the names of the metrics' numbers, and the metrics that need more samples.

    Compare a single object for all batches with the merged objects of four ranks, two of them
    without batches. A metric that draws random numbers cannot be compared.

    Raises:
        UserError: a metric has no ``merge`` or a wrong ``merge``, does not accept a batch, or does
            not compute numbers.
    """
    names, undetermined = set[str](), set[str]()
    for name, metric in metrics.items():
        first, second = batches
        one_rank = [[first, second, second]]
        try:
            single = _simulated(name, metric, one_rank, device)
        except ComputeError:  # such as a correlation, which needs more samples
            undetermined.add(name)
            continue
        names |= single.keys()
        parts = _simulated(name, metric, [[], [first], [], [second, second]], device)
        key = _differing(single, parts, like=first[0])
        repeated = _simulated(name, metric, one_rank, device) if key else {}
        if key and not _differing(single, repeated, like=first[0]):
            raise UserError(
                f"{title(name, metric)} depends on the number of ranks: {key} is "
                f"{single.get(key, math.nan):.6g} in one object and {parts.get(key, math.nan):.6g} "
                "merged from several",
                "correct its merge(self, other), which must add everything in the other",
            )
    return names, undetermined


def _simulated(
    name: str, metric: Metric, by_rank: Sequence[Sequence[Batch]], device: torch.device
) -> dict[str, float]:
    """Return the results of a metric over simulated ranks with these batches."""
    states = []
    for batches in by_rank:
        # One at a time: a metric may hold a network.
        rank = Evaluation({name: metric}, device=device)
        for outputs, targets in batches:
            rank.update(outputs, targets)
        states.append(rank.packed())
    return rank.over(states)


def _differing(single: Mapping[str, float], parts: Mapping[str, float], *, like: Any) -> str | None:
    """Return the first name with a difference above the rounding of outputs like these."""
    tensor, rounding = first_tensor(like), 1e-3  # far above the rounding of float32
    if tensor is not None and tensor.is_floating_point():
        rounding = max(rounding, 8 * torch.finfo(tensor.dtype).eps)
    for key in [*single, *parts]:
        expected, value = single.get(key, math.nan), parts.get(key, math.nan)
        if not np.isclose(value, expected, rtol=rounding, atol=1e-6, equal_nan=True):
            return key
    return None
