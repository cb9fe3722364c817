"""Batches for metrics, and what a metric computes when several ranks share them."""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ddp_runner.metrics.metric import Metric, merged, packed

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
NUM_CLASSES = 5
OUTPUTS = torch.randn(23, NUM_CLASSES, generator=GENERATOR)
TARGETS = torch.randint(NUM_CLASSES, (23,), generator=GENERATOR)
CUTS = ([], [3], [0], [2, 4], [0, 3], [3, 3], [6, 6])  # where the parts of ranks end
Batch = tuple[Tensor, Tensor]


def classified(num_samples: int) -> list[Batch]:
    """Return batches of scores and classes."""
    outputs, targets = OUTPUTS[:num_samples], TARGETS[:num_samples]
    return list(zip(outputs.split(4), targets.split(4), strict=True))


def some_ignored(num_samples: int) -> list[Batch]:
    """Return the same, every third target and all of the last two batches ignored."""
    targets = TARGETS[:num_samples].clone()
    targets[::3] = targets[-8:] = -100
    return list(zip(OUTPUTS[:num_samples].split(4), targets.split(4), strict=True))


def regressed(num_samples: int) -> list[Batch]:
    """Return batches of predictions and values."""
    return [(outputs[:, 0], outputs[:, 1]) for outputs, _ in classified(num_samples)]


def binary(num_samples: int) -> list[Batch]:
    """Return batches of a score and a label."""
    return [(outputs[:, 0], targets % 2) for outputs, targets in classified(num_samples)]


def on_ranks(metric: Metric, by_rank: list[list[Batch]]) -> Any:
    """Return what a metric computes when each rank takes in its own batches."""
    objects = [copy.deepcopy(metric) for _ in by_rank]
    for one, batches in zip(objects, by_rank, strict=True):
        for outputs, targets in batches:
            one.update(outputs, targets)
    states = [packed(one) for one in objects]
    results = [merged(one, states, CPU).compute() for one in objects]
    for other in results[1:]:
        assert_equal(other, results[0])
    return results[0]


def assert_equal(found: Any, expected: Any) -> None:
    """Compare numbers, tensors or mappings of them, up to the order of sums."""
    torch.testing.assert_close(
        torch.utils._pytree.tree_map(torch.as_tensor, found),
        torch.utils._pytree.tree_map(torch.as_tensor, expected),
        rtol=1e-6,
        atol=1e-7,
    )


def name_of(value: object) -> str:
    """Return the class of a metric as the name of its test."""
    return type(value).__name__ if hasattr(value, "compute") else ""


def assert_same_on_ranks(metric: Metric, whole: list[Batch], cuts: list[int]) -> None:
    """Compare a metric over ranks, whose parts end at the cuts, with one process."""
    alone = copy.deepcopy(metric)
    for outputs, targets in whole:
        alone.update(outputs, targets)
    edges = [0, *cuts, len(whole)]
    by_rank = [whole[first:last] for first, last in pairwise(edges)]
    assert_equal(on_ranks(metric, by_rank), alone.compute())
