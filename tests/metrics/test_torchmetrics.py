"""The metrics of torchmetrics are exact on several ranks as they are."""

from typing import Any

import pytest
import torch
import torchmetrics
from metric_batches import (
    CUTS,
    NUM_CLASSES,
    OUTPUTS,
    TARGETS,
    assert_same_on_ranks,
    binary,
    classified,
    name_of,
    on_ranks,
    regressed,
)
from ranks import run_ranks
from torch import Tensor

from ddp_runner.dist_env import DistEnv
from ddp_runner.metrics.evaluation import Evaluation
from ddp_runner.metrics.merge import UnmergeableError
from ddp_runner.metrics.metric import Metric, direction

THEIRS: list[tuple[Any, Any]] = [
    (torchmetrics.Accuracy(task="multiclass", num_classes=NUM_CLASSES), classified),
    (torchmetrics.AUROC(task="binary"), binary),
    (torchmetrics.AUROC(task="multiclass", num_classes=NUM_CLASSES), classified),
    (torchmetrics.AveragePrecision(task="multiclass", num_classes=NUM_CLASSES, thresholds=9),
     classified),
    (torchmetrics.ConfusionMatrix(task="multiclass", num_classes=NUM_CLASSES), classified),
    (torchmetrics.PearsonCorrCoef(), regressed),
    (torchmetrics.R2Score(), regressed),
    (torchmetrics.MeanSquaredError(squared=False), regressed),
    (torchmetrics.MetricCollection({
        "precision": torchmetrics.Precision(task="multiclass", num_classes=NUM_CLASSES),
        "recall": torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES)}), classified),
    # A group of one state, which one of them updates by assignment.
    (torchmetrics.MetricCollection(
        {"a": torchmetrics.PearsonCorrCoef(), "b": torchmetrics.ConcordanceCorrCoef()}), regressed),
    (torchmetrics.ClasswiseWrapper(
        torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES, average=None)),
     classified),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "batches"), THEIRS, ids=name_of)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_ranks_give_the_value_of_one_process(metric: Metric, batches: Any, cuts: list[int]) -> None:
    """With one, two and three ranks, unequal parts, and ranks that got no batch."""
    assert_same_on_ranks(metric, batches(23), cuts)


class Lazy(torchmetrics.Metric):
    """A metric of torchmetrics that has no state before its first batch."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a state."""
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Return the state."""
        return self.total


def test_states_that_only_some_ranks_have_are_an_error() -> None:
    """A rank without samples could not compute the metric."""
    with pytest.raises(UnmergeableError, match="adds states with its first batch"):
        on_ranks(Lazy(), [[(OUTPUTS, TARGETS)], []])


def test_their_direction_is_known() -> None:
    """By the name that they have for it."""
    assert direction(torchmetrics.MeanSquaredError()) == "min"


RANKING = torchmetrics.AUROC(task="multiclass", num_classes=NUM_CLASSES)
EACH = torchmetrics.MetricCollection(
    {"recall": torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES)}
)


def evaluated(env: DistEnv) -> list[dict[str, float]]:
    """Evaluate twice; rank 0 has all batches."""
    results = []
    for _ in range(2):
        evaluation = Evaluation({"each": EACH, "ranking": RANKING}, device=torch.device("cpu"))
        for outputs, targets in classified(23) if env.is_rank_zero else ():
            evaluation.update(outputs, targets)
        results.append(evaluation.compute())
    return results


def test_they_exchange_nothing_by_themselves() -> None:
    """A rank without a batch has nothing to exchange, and would let the others wait."""
    whole = classified(23)
    recall, ranking = on_ranks(EACH, [whole])["recall"], on_ranks(RANKING, [whole])
    expected = {"eval/each_recall": float(recall), "eval/ranking": float(ranking)}
    for found in run_ranks(evaluated, 2):
        assert found[0] == found[1]
        assert found[0] == pytest.approx(expected)
