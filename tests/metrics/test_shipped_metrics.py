"""Each metric that we ship is the one of scikit-learn, over batches of unequal size."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import Metric
from ddp_runner.metrics.shipped import MAE, RMSE, Perplexity, TopKAccuracy

GENERATOR = torch.Generator().manual_seed(0)
NUM_SAMPLES, NUM_CLASSES = 203, 7
CLASSES = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=GENERATOR)
LOGITS = torch.randn(NUM_SAMPLES, NUM_CLASSES, generator=GENERATOR)
LOGITS += 2 * F.one_hot(CLASSES, NUM_CLASSES)
VALUES = 1e4 + torch.randn(NUM_SAMPLES, 3, generator=GENERATOR)
PREDICTIONS = VALUES + 0.5 * torch.randn(NUM_SAMPLES, 3, generator=GENERATOR)
PIXEL_LOGITS = torch.randn(20, 4, 8, 9, generator=GENERATOR)
PIXELS = torch.where(
    torch.rand(20, 8, 9, generator=GENERATOR) < 0.5,
    PIXEL_LOGITS.argmax(dim=1),
    torch.randint(3, (20, 8, 9), generator=GENERATOR),
)
TOKEN_LOGITS = torch.randn(20, 11, 13, generator=GENERATOR)
TOKENS = torch.randint(13, (20, 11), generator=GENERATOR)


def result(metric: Metric, outputs: Tensor, targets: Tensor) -> Any:
    """Return what a metric computes after three batches, the last one smaller."""
    size = math.ceil(len(outputs) / 3) + 1
    for batch in zip(outputs.split(size), targets.split(size), strict=True):
        metric.update(*batch)
    return metric.compute()


def sk() -> Any:
    """Import scikit-learn's metrics, which takes seconds."""
    from sklearn import metrics

    return metrics


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "expected"),
    [
        *((TopKAccuracy(k=k), LOGITS, CLASSES,
           lambda k=k: sk().top_k_accuracy_score(CLASSES, LOGITS, k=k)) for k in (1, 2, 5)),
        (MAE(), PREDICTIONS, VALUES, lambda: sk().mean_absolute_error(VALUES, PREDICTIONS)),
        (RMSE(), PREDICTIONS, VALUES, lambda: sk().mean_squared_error(VALUES, PREDICTIONS) ** 0.5),
        (TopKAccuracy(k=1), PIXEL_LOGITS, PIXELS, lambda: sk().accuracy_score(
            PIXELS.flatten(), PIXEL_LOGITS.argmax(dim=1).flatten())),
        (Perplexity(), TOKEN_LOGITS, TOKENS, lambda: math.exp(sk().log_loss(
            TOKENS.flatten(), TOKEN_LOGITS.reshape(-1, 13).double().softmax(dim=1)))),
        (Perplexity(), TOKEN_LOGITS.movedim(-1, 1), TOKENS, lambda: math.exp(sk().log_loss(
            TOKENS.flatten(), TOKEN_LOGITS.reshape(-1, 13).double().softmax(dim=1)))),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else "",
)  # fmt: skip
def test_it_is_scikit_learns(
    metric: Metric, outputs: Tensor, targets: Tensor, expected: Callable[[], float]
) -> None:
    """The data are random."""
    assert result(metric, outputs, targets) == pytest.approx(float(expected()), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (TopKAccuracy(k=2), PIXEL_LOGITS, PIXELS),
        (TopKAccuracy(k=1), PIXEL_LOGITS, PIXELS),
        (Perplexity(), TOKEN_LOGITS, TOKENS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else "",
)
def test_targets_of_minus_100_do_not_count(
    metric: Metric, outputs: Tensor, targets: Tensor
) -> None:
    """The value is that of the other half alone."""
    expected = result(metric, outputs[:10], targets[:10])
    ignored = torch.cat([targets[:10], torch.full_like(targets[10:], -100)])
    found = result(type(metric)(**options(metric)), outputs, ignored)
    assert found == pytest.approx(expected, rel=1e-12)


def options(metric: Metric) -> dict[str, int]:
    """Return the arguments that a metric was made with."""
    return {"k": metric.k} if isinstance(metric, TopKAccuracy) else {}


@pytest.mark.parametrize(
    "metric",
    [TopKAccuracy(k=1), MAE(), RMSE(), Perplexity()],
    ids=lambda metric: type(metric).__name__,
)
def test_without_a_sample_it_is_not_a_number(metric: Metric) -> None:
    """0 would look like a result."""
    assert math.isnan(metric.compute())


@pytest.mark.parametrize(
    ("make", "outputs", "targets", "sentence"),
    [
        (lambda: TopKAccuracy(k=0), LOGITS, CLASSES, r"k \(0\) must be 1 or greater"),
        (lambda: TopKAccuracy(k=8), LOGITS, CLASSES, r"k \(8\) must be 7 or less"),
        (lambda: TopKAccuracy(k=2), LOGITS, CLASSES[:, None], "have no scores of classes"),
        (
            lambda: TopKAccuracy(k=1),
            PIXEL_LOGITS,
            PIXELS + 252,
            "has 1440 targets outside the classes: 4",
        ),
        (MAE, VALUES[:, :1], VALUES[:, 0], "outputs and targets of the same shape"),
        (Perplexity, LOGITS, TOKENS, "have no scores of classes"),
    ],
)
def test_outputs_that_do_not_fit_are_an_error(
    make: Callable[[], Metric], outputs: Tensor, targets: Tensor, sentence: str
) -> None:
    """Broadcasting would give a number that means nothing."""

    def compute() -> None:
        metric = make()
        metric.update(outputs, targets)
        metric.compute()  # only here may a GPU be asked what it has counted

    with pytest.raises(UserError, match=sentence):
        compute()
