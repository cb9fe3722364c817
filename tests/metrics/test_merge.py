"""What a metric takes in on several ranks gives the value of one rank that takes in everything."""

import copy
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from own_metrics import (
    Appended,
    Counted,
    Growing,
    Largest,
    Nested,
    Nothing,
    Seen,
    Shortened,
    Summed,
    Vector,
)
from ranks import run_ranks
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.metrics.classification import AUC, TopKAccuracy
from ddp_runner.metrics.evaluation import Evaluation
from ddp_runner.metrics.language import Perplexity
from ddp_runner.metrics.merge import UnmergeableError, merged, state_of
from ddp_runner.metrics.metric import Metric, direction
from ddp_runner.metrics.regression import MAE, R2, RMSE
from ddp_runner.metrics.segmentation import MeanIoU, PixelAccuracy

GENERATOR = torch.Generator().manual_seed(0)
NUM_CLASSES = 5
OUTPUTS = torch.randn(23, NUM_CLASSES, generator=GENERATOR)
TARGETS = torch.randint(NUM_CLASSES, (23,), generator=GENERATOR)
CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]


def classified(num_samples: int) -> list[Batch]:
    """Return batches of scores and classes."""
    outputs, targets = OUTPUTS[:num_samples], TARGETS[:num_samples]
    return list(zip(outputs.split(4), targets.split(4), strict=True))


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
    states = [copy.deepcopy(state_of(one)) for one in objects]
    results = [merged(one, copy.deepcopy(metric), states).compute() for one in objects]
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


PLAIN: list[tuple[Any, Any]] = [
    *((metric, classified) for metric in (
        TopKAccuracy(k=2), AUC(), MeanIoU(), PixelAccuracy(), Perplexity(), Summed(), Counted(),
        Appended(), Largest(), Nested(), Vector())),
    *((metric, regressed) for metric in (MAE(), RMSE(), R2())),
]  # fmt: skip
THEIRS: list[tuple[Any, Any]] = [
    (torchmetrics.Accuracy(task="multiclass", num_classes=NUM_CLASSES), classified),
    (torchmetrics.AUROC(task="binary"), binary),
    (torchmetrics.AUROC(task="multiclass", num_classes=NUM_CLASSES), classified),
    (torchmetrics.AveragePrecision(task="multiclass", num_classes=NUM_CLASSES, thresholds=9),
     classified),
    (torchmetrics.ConfusionMatrix(task="multiclass", num_classes=NUM_CLASSES), classified),
    (torchmetrics.PearsonCorrCoef(), regressed),
    (torchmetrics.SpearmanCorrCoef(), regressed),
    (torchmetrics.R2Score(), regressed),
    (torchmetrics.MeanSquaredError(squared=False), regressed),
    (torchmetrics.MetricCollection({
        "precision": torchmetrics.Precision(task="multiclass", num_classes=NUM_CLASSES),
        "recall": torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES)}), classified),
    (torchmetrics.ClasswiseWrapper(
        torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES, average=None)),
     classified),
]  # fmt: skip


class Lazy(torchmetrics.Metric):
    """A metric of torchmetrics that has no state before its first batch."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a state."""
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Return the state."""
        return self.total


def name_of(value: object) -> str:
    """Return the class of a metric as the name of its test."""
    return type(value).__name__ if hasattr(value, "compute") else ""


@pytest.mark.parametrize(("metric", "batches"), [*PLAIN, *THEIRS], ids=name_of)
@pytest.mark.parametrize("cuts", [[], [3], [0], [2, 4], [0, 3], [3, 3], [6, 6]], ids=str)
def test_ranks_give_the_value_of_one_process(metric: Metric, batches: Any, cuts: list[int]) -> None:
    """With one, two and three ranks, unequal parts, and ranks that got no batch."""
    whole = batches(23)
    alone = copy.deepcopy(metric)
    for outputs, targets in whole:
        alone.update(outputs, targets)
    edges = [0, *cuts, len(whole)]
    by_rank = [whole[first:last] for first, last in pairwise(edges)]
    assert_equal(on_ranks(metric, by_rank), alone.compute())


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
        (Lazy(), "adds states with its first batch"),
    ],
    ids=name_of,
)
def test_a_state_that_is_no_sum_is_an_error(metric: Metric, sentence: str) -> None:
    """A number that is silently wrong on several ranks would be worse."""
    targets = TARGETS[:4].reshape(2, 2)
    by_rank = [[(OUTPUTS[:4, 0].reshape(2, 2), targets)], [(targets + 1, targets + 1)], []]
    with pytest.raises(UnmergeableError, match=sentence):
        on_ranks(metric, by_rank)


def test_the_direction_is_asked_of_the_class() -> None:
    """As torchmetrics names it; a class need not say."""
    assert [direction(one) for one in (MAE(), AUC(), Nothing())] == ["min", "max", None]
    assert direction(torchmetrics.MeanSquaredError()) == "min"


def evaluated(env: DistEnv, metrics: dict[str, Metric], num_batches: list[int]) -> list[Any]:
    """Evaluate twice the batches of each rank, and say on which device the state was."""
    first = sum(num_batches[: env.rank])
    results: list[Any] = []
    for _ in range(2):
        evaluation = Evaluation(metrics, device=CPU)
        for outputs, targets in classified(23)[first : first + num_batches[env.rank]]:
            evaluation.update(outputs, targets)
        results.append(evaluation.compute())
    return results


METRICS: dict[str, Metric] = {
    "top": TopKAccuracy(k=2),
    "auc": AUC(),
    "summed": Summed(),
    "vector": Vector(),
    "theirs": torchmetrics.MetricCollection(
        {"recall": torchmetrics.Recall(task="multiclass", num_classes=NUM_CLASSES)}
    ),
    "ranking": torchmetrics.AUROC(task="multiclass", num_classes=NUM_CLASSES),
}


def test_an_evaluation_over_gloo_is_that_of_one_rank() -> None:
    """Two evaluations give the same; ranks get the same; torchmetrics exchanges nothing more."""
    (alone,) = run_ranks(evaluated, 1, METRICS, [6])
    by_rank = run_ranks(evaluated, 3, METRICS, [4, 0, 2])
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0][0] == by_rank[0][1]
    assert by_rank[0][0] == pytest.approx(alone[0])
    assert list(alone[0]) == [
        *("eval/top", "eval/auc", "eval/summed"),
        *(f"eval/vector_{index}" for index in range(NUM_CLASSES)),
        *("eval/theirs_recall", "eval/ranking"),
    ]


def test_a_metric_that_cannot_take_a_batch_is_named() -> None:
    """With its shapes, and the exception."""
    evaluation = Evaluation({"mine": Summed()}, device=CPU)
    with pytest.raises(UserError, match=r"metrics.mine \(Summed\) cannot take outputs \(2,\) of"):
        evaluation.update(torch.zeros(2), "labels")
    with pytest.raises(UserError, match=r"train\.step returns none"):
        evaluation.update(None, None)


def errors(env: DistEnv) -> list[str]:
    """Return the errors of metrics that compute no number."""
    found = []
    for metric in (Nothing(), Seen()):
        evaluation = Evaluation({"mine": metric}, device=CPU)
        evaluation.update(OUTPUTS[env.rank :], TARGETS)
        with pytest.raises(UserError) as error:
            evaluation.compute()
        found.append(str(error.value))
    return found


def test_ranks_raise_the_same_error() -> None:
    """So no rank waits for another."""
    first, second = run_ranks(errors, 2)
    assert first == second
    assert first[0].startswith("metrics.mine computes a NoneType; return a number")
    assert first[1].startswith("metrics.mine (Seen) has a set in seen")


def test_a_state_is_on_the_outputs_device() -> None:
    """Also in a list, and in a buffer of a module."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2))
            self.own = [torch.zeros(1), {"deep": torch.zeros(1)}]
            self.inner = Summed()

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.seen = [self.total.device, self.own[0].device, self.own[1]["deep"].device]
            self.seen.append(self.inner.total.device)

        def compute(self) -> float:
            return 0.0

    metric = Module()
    evaluation = Evaluation({"mine": metric}, device=torch.device("meta"))
    evaluation.update(OUTPUTS, TARGETS)
    (own,) = evaluation._own.values()
    assert {device.type for device in own.seen} == {"meta"}
    assert metric.total.device.type == "cpu"
