"""What a metric takes in on several ranks gives the value of one rank that takes in everything."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from metric_batches import (
    CUTS,
    OUTPUTS,
    TARGETS,
    assert_same_on_ranks,
    classified,
    name_of,
    on_ranks,
    regressed,
)
from own_metrics import (
    Appended,
    Counted,
    Growing,
    Largest,
    Nested,
    Seen,
    Shortened,
    Summed,
    Vector,
)
from torch import Tensor

from ddp_runner.metrics.classification import AUC, MeanIoU, Perplexity, PixelAccuracy, TopKAccuracy
from ddp_runner.metrics.merge import UnmergeableError, merged, state_of
from ddp_runner.metrics.metric import Metric
from ddp_runner.metrics.regression import MAE, R2, RMSE

PLAIN: list[tuple[Any, Any]] = [
    *((metric, classified) for metric in (
        TopKAccuracy(k=2), AUC(), MeanIoU(), PixelAccuracy(), Perplexity(), Summed(), Counted(),
        Appended(), Largest(), Nested(), Vector())),
    *((metric, regressed) for metric in (MAE(), RMSE(), R2())),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "batches"), PLAIN, ids=name_of)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_ranks_give_the_value_of_one_process(metric: Metric, batches: Any, cuts: list[int]) -> None:
    """With one, two and three ranks, unequal parts, and ranks that got no batch."""
    assert_same_on_ranks(metric, batches(23), cuts)


def test_arrays_and_counters_are_summed() -> None:
    """NumPy's arrays, and the entries of a dict that only some ranks have."""

    class Mixed:
        def __init__(self) -> None:
            self.array = np.ones(2)
            self.labels: Counter[int] = Counter({7: 1})
            self.flags = torch.tensor([False, True, False])
            self.is_used = False
            self.name, self.weights = "mixed", (torch.ones(2), math.inf)

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.array[0] += len(targets)
            self.labels.update(targets.tolist())
            self.flags[int(targets[0])] = True
            self.is_used = True

        def compute(self) -> Any:
            return self

    parts = [[(OUTPUTS[:2], torch.tensor([0, 7]))], [], [(OUTPUTS[:1], torch.tensor([0]))]]
    objects = [Mixed() for _ in parts]
    for one, batches in zip(objects, parts, strict=True):
        for outputs, targets in batches:
            one.update(outputs, targets)
    whole: Any = merged(objects[1], Mixed(), [state_of(one) for one in objects])
    assert whole.array.tolist() == [4, 1]
    assert whole.labels == {7: 2, 0: 2}
    assert whole.flags.tolist() == [True, True, False]
    assert (whole.is_used, whole.name, whole.weights[1]) == (True, "mixed", math.inf)


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (Seen(), "has a set in seen that differs between ranks"),
        (Growing(), r"has shapes \(0,\) and \(4,\) in scores"),
        (Shortened(), "takes items out of the list kept"),
    ],
    ids=name_of,
)
def test_a_state_that_is_no_sum_is_an_error(metric: Metric, sentence: str) -> None:
    """A number that is silently wrong on several ranks would be worse."""
    targets = TARGETS[:4].reshape(2, 2)
    by_rank = [[(OUTPUTS[:4, 0].reshape(2, 2), targets)], [(targets + 1, targets + 1)], []]
    with pytest.raises(UnmergeableError, match=sentence):
        on_ranks(metric, by_rank)
