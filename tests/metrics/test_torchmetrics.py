"""The metrics of torchmetrics are exact on several ranks as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from metric_batches import (
    CUTS,
    NUM_CLASSES,
    OUTPUTS,
    TARGETS,
    assert_same_on_ranks,
    binary,
    classified,
    on_ranks,
    regressed,
    some_ignored,
)
from ranks import run_ranks
from tiers import first_of
from torch import Tensor

from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import Evaluation, directions
from ddp_runner.metrics.metric_trial import try_metrics

# By default three ranks, of which the first has no batch; then one rank, two, and other parts.
QUICK_FIRST = first_of([[0, 3], *(cuts for cuts in CUTS if cuts != [0, 3])])

# Made in a test: the library takes two seconds to import.
THEIRS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "Accuracy": (lambda tm: tm.Accuracy(task="multiclass", num_classes=NUM_CLASSES), classified),
    "AUROC of two": (lambda tm: tm.AUROC(task="binary"), binary),
    "AUROC": (lambda tm: tm.AUROC(task="multiclass", num_classes=NUM_CLASSES), classified),
    "AUROC of some": (
        lambda tm: tm.AUROC(task="multiclass", num_classes=NUM_CLASSES, ignore_index=-100),
        some_ignored,
    ),
    "AveragePrecision": (
        lambda tm: tm.AveragePrecision(task="multiclass", num_classes=NUM_CLASSES, thresholds=9),
        classified,
    ),
    "ConfusionMatrix": (
        lambda tm: tm.ConfusionMatrix(task="multiclass", num_classes=NUM_CLASSES),
        classified,
    ),
    "PearsonCorrCoef": (lambda tm: tm.PearsonCorrCoef(), regressed),
    "R2Score": (lambda tm: tm.R2Score(), regressed),
    "R2Score of two": (
        lambda tm: tm.R2Score(),
        lambda size: [(one[:, :2], one[:, 2:4]) for one, _ in classified(size)],
    ),
    "JaccardIndex": (
        lambda tm: tm.JaccardIndex("multiclass", num_classes=NUM_CLASSES, ignore_index=-100),
        some_ignored,
    ),
    "MeanSquaredError": (lambda tm: tm.MeanSquaredError(squared=False), regressed),
    "MetricCollection": (
        lambda tm: tm.MetricCollection(
            {
                "precision": tm.Precision(task="multiclass", num_classes=NUM_CLASSES),
                "recall": tm.Recall(task="multiclass", num_classes=NUM_CLASSES),
            }
        ),
        classified,
    ),
    # A group of one state, which one of them updates by assignment.
    "a group of one state": (
        lambda tm: tm.MetricCollection({"a": tm.PearsonCorrCoef(), "b": tm.ConcordanceCorrCoef()}),
        regressed,
    ),
    "ClasswiseWrapper": (
        lambda tm: tm.ClasswiseWrapper(
            tm.Recall(task="multiclass", num_classes=NUM_CLASSES, average=None)
        ),
        classified,
    ),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("cuts", QUICK_FIRST, ids=str)
def test_ranks_give_the_value_of_one_process(name: str, cuts: list[int]) -> None:
    """With one, two and three ranks, unequal parts, and ranks that got no batch."""
    import torchmetrics

    make, batches = THEIRS[name]
    assert_same_on_ranks(make(torchmetrics), batches(23), cuts)


@pytest.mark.parametrize("name", sorted(THEIRS.keys() - {"ConfusionMatrix"}))  # no number
def test_the_trial_lets_them_through(name: str) -> None:
    """Their states are merged as they ask."""
    import torchmetrics

    make, batches = THEIRS[name]
    metrics = {"theirs": make(torchmetrics)}
    names, without = try_metrics(metrics, *batches(23)[:2], device=torch.device("cpu"))
    assert (bool(names), without) == (True, set())


def test_an_attribute_that_is_no_state_of_theirs_is_rejected() -> None:
    """Nobody would merge it."""
    import torchmetrics

    class Attribute(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.hits = 0

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.hits += int((outputs.argmax(dim=1) >= targets).sum())

        def compute(self) -> int:
            return self.hits

    batches = classified(23)[:2]
    with pytest.raises(UserError, match=r"\(Attribute\) depends on the number of ranks"):
        try_metrics({"mine": Attribute()}, *batches, device=torch.device("cpu"))


def test_states_that_only_some_ranks_have_are_an_error() -> None:
    """A rank without samples could not compute the metric."""
    import torchmetrics

    class Lazy(torchmetrics.Metric):
        """A metric of torchmetrics that has no state before its first batch."""

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            """Add a state."""
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def compute(self) -> Tensor:
            """Return the state."""
            return self.total

    with pytest.raises(UserError, match="adds states with its first batch"):
        on_ranks(Lazy(), [[(OUTPUTS, TARGETS)], []])


def test_their_direction_is_known() -> None:
    """By the name that they have for it."""
    import torchmetrics

    assert directions({"mse": torchmetrics.MeanSquaredError()}) == {"eval/mse": "min"}


def two_metrics() -> dict[str, Any]:
    """Return a collection and a metric that keeps all samples."""
    import torchmetrics

    recall = torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES)
    ranking = torchmetrics.AUROC(task="multiclass", num_classes=NUM_CLASSES)
    return {"each": torchmetrics.MetricCollection({"recall": recall}), "ranking": ranking}


def evaluated(env: DistEnv) -> list[dict[str, float]]:
    """Evaluate twice; rank 0 has all batches."""
    results, metrics = [], two_metrics()
    for _ in range(2):
        evaluation = Evaluation(metrics, device=torch.device("cpu"))
        for outputs, targets in classified(23) if env.is_rank_zero else ():
            evaluation.update(outputs, targets)
        results.append(evaluation.over(gather_objects(evaluation.packed())))
    return results


@pytest.mark.full
def test_they_exchange_nothing_by_themselves() -> None:
    """A rank without a batch has nothing to exchange, and would let the others wait."""
    whole, metrics = classified(23), two_metrics()
    recall, ranking = (on_ranks(metrics[name], [whole]) for name in ("each", "ranking"))
    expected = {"eval/each_recall": float(recall["recall"]), "eval/ranking": float(ranking)}
    for found in run_ranks(evaluated, 2):
        assert found[0] == found[1]
        assert found[0] == pytest.approx(expected)
