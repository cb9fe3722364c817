"""Over several ranks a metric has the value of one process, or its merge is rejected."""

from collections import Counter
from typing import Any

import pytest
import torch
from metric_batches import (
    CUTS,
    assert_same_on_ranks,
    classified,
    name_of,
    on_ranks,
    regressed,
    some_ignored,
)
from own_metrics import Appended, Counted, Largest, Nested, Summed, Vector

from ddp_runner.metrics.metric import Metric, summed
from ddp_runner.metrics.shipped import MAE, RMSE, Perplexity, TopKAccuracy

OF_CLASSES: tuple[Metric, ...] = (TopKAccuracy(k=2), TopKAccuracy(k=1), Perplexity())
PLAIN: list[tuple[Any, Any]] = [
    *((metric, classified) for metric in (
        *OF_CLASSES, Summed(), Counted(), Appended(), Largest(), Nested(), Vector())),
    *((metric, some_ignored) for metric in OF_CLASSES),
    *((metric, regressed) for metric in (MAE(), RMSE())),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "batches"), PLAIN, ids=name_of)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_ranks_give_the_value_of_one_process(metric: Metric, batches: Any, cuts: list[int]) -> None:
    """With one, two and three ranks, unequal parts, and ranks that got no batch."""
    assert_same_on_ranks(metric, batches(23), cuts)


@pytest.mark.parametrize("metric", OF_CLASSES, ids=name_of)
def test_ignored_targets_are_as_if_they_were_not_there(metric: Metric) -> None:
    """Outputs of 16 bits, as with train.precision=bf16, count as their own values do."""
    batches = [(outputs.bfloat16(), targets) for outputs, targets in some_ignored(23)]
    kept = [(outputs[targets >= 0], targets[targets >= 0]) for outputs, targets in batches]
    found = on_ranks(metric, [batches[:3], batches[3:]])
    whole = [(outputs.float(), targets) for outputs, targets in kept if len(targets)]
    assert found == pytest.approx(on_ranks(metric, [whole]), rel=1e-6)


def test_what_only_grows_is_summed() -> None:
    """Dicts key by key, lists in order; None is what a rank without a batch has."""

    class Holder:
        merge = summed("number", "tensor", "kept", "by_key")

        def __init__(self, **state: Any) -> None:
            vars(self).update(state)

    own = Holder(
        number=1.5, tensor=None, kept=["a"], by_key=Counter({"both": 1, "own": 1}), untouched=7
    )
    own.merge(
        Holder(number=2, tensor=torch.ones(2), kept=["b", "c"], by_key={"other": [1], "both": 3})
    )
    assert (own.number, own.kept, own.untouched) == (3.5, ["a", "b", "c"], 7)
    assert own.tensor.tolist() == [1, 1]
    assert own.by_key == Counter({"both": 4, "own": 1, "other": [1]})
    own.merge(Holder(number=0, tensor=None, kept=[], by_key={"other": [2]}))
    assert own.tensor.tolist() == [1, 1]
    assert own.by_key["other"] == [1, 2]
