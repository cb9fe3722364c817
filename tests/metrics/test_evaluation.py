"""An evaluation's metrics: the same numbers on every rank, and mistakes by the metric's name."""

import pickle
from typing import Any

import pytest
import torch
from metric_batches import NUM_CLASSES, OUTPUTS, TARGETS, classified
from own_metrics import Largest, Last, Nothing, Seen, Summed, Vector
from ranks import run_ranks
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.metrics.classification import AUC, TopKAccuracy
from ddp_runner.metrics.evaluation import Evaluation
from ddp_runner.metrics.merge import state_of
from ddp_runner.metrics.metric import Metric, direction
from ddp_runner.metrics.regression import MAE

CPU = torch.device("cpu")


def test_the_direction_is_asked_of_the_class() -> None:
    """As torchmetrics names it; a class need not say."""
    assert [direction(one) for one in (MAE(), AUC(), Nothing())] == ["min", "max", None]


def evaluated(env: DistEnv, metrics: dict[str, Metric], num_batches: list[int]) -> list[Any]:
    """Evaluate twice the batches of each rank."""
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
}


def test_an_evaluation_over_gloo_is_that_of_one_rank() -> None:
    """Two evaluations give the same, and all ranks get it."""
    (alone,) = run_ranks(evaluated, 1, METRICS, [6])
    by_rank = run_ranks(evaluated, 3, METRICS, [4, 0, 2])
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0][0] == by_rank[0][1]
    assert by_rank[0][0] == pytest.approx(alone[0])
    assert list(alone[0]) == [
        *("eval/top", "eval/auc", "eval/summed"),
        *(f"eval/vector_{index}" for index in range(NUM_CLASSES)),
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


def unpicklable(env: DistEnv) -> str:
    """Return the error of a metric that cannot be sent."""
    metric = Largest()
    metric.weigh = lambda value: value
    with pytest.raises(UserError) as error:
        Evaluation({"largest": metric}, device=CPU).compute()
    return str(error.value)


@pytest.mark.parametrize("metric", [AUC(), Last()], ids=["own state", "merge"])
def test_a_state_is_sent_without_what_it_is_a_part_of(metric: Metric) -> None:
    """The targets of a batch are a view of the targets of the whole set."""
    outputs, targets = torch.zeros(10_000), torch.zeros(10_000, dtype=torch.int64)
    for first in range(0, 100, 10):
        metric.update(outputs[first : first + 10], targets[first : first + 10])
    assert len(pickle.dumps(state_of(metric))) < 10_000


def test_an_object_with_merge_must_be_sent_whole() -> None:
    """The error names it and says what it may not hold."""
    (error,) = run_ranks(unpicklable, 1)
    assert error.startswith("metrics (largest) cannot be sent to the other ranks: ")
    assert error.endswith("an object with merge(self, other) may hold no lambda and no file")


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
