"""An evaluation's metrics: the same numbers on every rank, and mistakes by the metric's name."""

import copy
from typing import Any

import pytest
import torch
from metric_batches import CPU, OUTPUTS, TARGETS, Batch, classified, name_of, some_ignored
from own_metrics import (
    Appended,
    Counted,
    Drawn,
    Forgetful,
    Fragile,
    Largest,
    Last,
    MeanOfMeans,
    Nested,
    Nothing,
    Summed,
    SumOfLargest,
    Unmerged,
    Vector,
)
from ranks import run_ranks
from torch import Tensor, nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import Evaluation, Metric, directions, summed
from ddp_runner.metrics.metric_trial import try_metrics
from ddp_runner.metrics.shipped import MAE, Perplexity, TopKAccuracy


def test_the_direction_is_asked_of_the_class() -> None:
    """As torchmetrics names it; a class need not say."""
    metrics = {"low": MAE(), "high": TopKAccuracy(k=1), "either": Nothing()}
    assert directions(metrics) == {"eval/low": "min", "eval/high": "max"}


def evaluated(env: DistEnv, metrics: dict[str, Metric], num_batches: list[int]) -> list[Any]:
    """Evaluate twice the batches of each rank."""
    first = sum(num_batches[: env.rank])
    results: list[Any] = []
    for _ in range(2):
        evaluation = Evaluation(metrics, device=CPU)
        for outputs, targets in some_ignored(23)[first : first + num_batches[env.rank]]:
            evaluation.update(outputs, targets)
        results.append(evaluation.over(gather_objects(evaluation.packed())))
    return results


METRICS: dict[str, Metric] = {
    "top": TopKAccuracy(k=2),
    "perplexity": Perplexity(),
    "summed": Summed(),
    "appended": Appended(),
    "largest": Largest(),
    "vector": Vector(),
}


@pytest.mark.parametrize("num_batches", [[6], [4, 2], [4, 0, 2]], ids=len)
def test_an_evaluation_over_gloo_is_that_of_one_process(num_batches: list[int]) -> None:
    """Some targets are ignored, and a rank may have no batch. Two evaluations give the same."""
    alone = {name: copy.deepcopy(metric) for name, metric in METRICS.items()}
    for outputs, targets in some_ignored(23):
        for metric in alone.values():
            metric.update(outputs, targets)
    vector = alone.pop("vector").compute().tolist()
    expected = {f"eval/{name}": float(metric.compute()) for name, metric in alone.items()}
    expected |= {f"eval/vector_{index}": value for index, value in enumerate(vector)}
    by_rank = run_ranks(evaluated, len(num_batches), METRICS, num_batches)
    for once, again in by_rank:
        assert once == again == by_rank[0][0]
        assert once == pytest.approx(expected)


def test_a_metric_that_cannot_take_a_batch_is_named() -> None:
    """With its shapes, and the exception."""
    evaluation = Evaluation({"mine": Summed()}, device=CPU)
    with pytest.raises(UserError, match=r"metrics.mine \(Summed\) cannot take outputs \(2,\) of"):
        evaluation.update(torch.zeros(2), "labels")
    with pytest.raises(UserError, match=r"train\.step returns none"):
        evaluation.update(None, None)


def errors(env: DistEnv) -> list[str]:
    """Return the errors of metrics that no evaluation of these ranks can compute."""
    found = []
    for metric in (Nothing(), Fragile()):
        evaluation = Evaluation({"mine": metric}, device=CPU)
        if env.is_rank_zero:
            evaluation.update(OUTPUTS, TARGETS)
        with pytest.raises(UserError) as error:
            evaluation.over(gather_objects(evaluation.packed()))
        found.append(str(error.value))
    return found


def test_ranks_raise_the_same_error() -> None:
    """So no rank waits for another."""
    first, second = run_ranks(errors, 2)
    assert first == second
    assert first[0].startswith("metrics.mine (Nothing) computes a NoneType: TypeError")
    assert first[1].startswith("metrics.mine (Fragile) cannot merge the object of another rank: T")


BATCHES = classified(23)[:2]


def tried(metric: Metric, batches: list[Batch] = BATCHES) -> tuple[set[str], set[str]]:
    """Try a metric on two batches."""
    return try_metrics({"mine": metric}, *batches, device=CPU)


@pytest.mark.parametrize(
    "metric",
    [Summed(), Counted(), Appended(), Largest(), Last(), Nested(), Vector(), Drawn()],
    ids=name_of,
)
def test_a_merge_that_is_right_is_let_through(metric: Metric) -> None:
    """So is a metric that draws random numbers: nobody knows its value."""
    names, without = tried(metric)
    assert all(name.startswith("eval/mine") for name in names)
    assert (bool(names), without) == (True, set())


def test_rounding_is_no_difference() -> None:
    """A sum of 16 bits depends on its order by more than one of float32."""
    batches = [(outputs.bfloat16(), targets) for outputs, targets in BATCHES]
    assert tried(Vector(), batches) == tried(Vector())


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (Unmerged(), r"\(Unmerged\): it has no merge\(self, other\).*; write it, or merge = sum"),
        (SumOfLargest(), r"\(SumOfLargest\) depends on the number of ranks: eval/mine is "
                         r"2\.1152\d+ in one object and 3\.9682\d+ merged from several; correct"),
        (MeanOfMeans(), r"\(MeanOfMeans\) depends on the number of ranks: eval/mine is 0.469"),
        (Forgetful(), r"\(Forgetful\) cannot be computed after its merge: TypeError"),
        (Fragile(), r"\(Fragile\) cannot merge the object of another rank: TypeError: unsup"),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_merge_that_is_wrong_is_rejected(metric: Metric, sentence: str) -> None:
    """Its value would depend on the number of ranks, and nobody would see it."""
    with pytest.raises(UserError, match=r"^metrics\.mine " + sentence):
        tried(metric)


def test_an_object_that_cannot_be_sent_is_rejected() -> None:
    """The error says what it may not hold, whether it did so from the start or not."""
    metric = Largest()
    vars(metric)["weigh"] = lambda value: value
    line = r"^metrics\.mine \(Largest\) cannot be sent to other ranks: .*; remove lambdas and"
    with pytest.raises(UserError, match=line):
        Evaluation({"mine": metric}, device=CPU)
    evaluation = Evaluation({"mine": Last()}, device=CPU)
    evaluation.update(OUTPUTS, lambda: TARGETS)
    with pytest.raises(UserError, match=line.replace("Largest", "Last")):
        evaluation.packed()


class Deep(nn.Module):
    """Holds tensors wherever it can."""

    merge = summed()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.weight = nn.Parameter(torch.zeros(2))
        self.own = [torch.zeros(1), {"deep": (torch.zeros(1), Summed())}]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Do nothing."""

    def compute(self) -> float:
        """Return a number."""
        return 0.0


def test_a_state_is_on_the_outputs_device() -> None:
    """Also in a buffer of a module, in a tuple and in another metric."""
    metric = Deep()
    evaluation = Evaluation({"mine": metric}, device=torch.device("meta"))
    own: Any = evaluation._metrics["mine"]
    first, rest = own.own
    held = [own.total, own.weight, first, rest["deep"][0], rest["deep"][1].total]
    assert {one.device.type for one in held} == {"meta"}
    assert isinstance(own.weight, nn.Parameter)
    assert metric.total.device.type == "cpu"
