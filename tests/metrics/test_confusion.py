"""Every prediction is counted once, in the row of its true class."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ddp_runner.errors import UserError
from ddp_runner.metrics.shipped import classification_metrics, confusion_counts, reject_strays

NUM_CLASSES = 10


def counts_of(targets: list[int], predicted: list[int], num_outputs: int) -> Tensor:
    """Return the counts of a model whose highest scores are the predicted outputs."""
    outputs = one_hot(torch.tensor(predicted), num_outputs).double()
    return confusion_counts(outputs, torch.tensor(targets), num_classes=NUM_CLASSES)[:-1]


def test_an_output_outside_the_classes_is_wrong_and_no_other_class() -> None:
    """Class 1 taken for output 12 of 20 is not a class 2 that was recognised."""
    counts = counts_of([1, 3, 4], [12, 3, 5], num_outputs=20)
    assert counts.shape == (NUM_CLASSES, NUM_CLASSES + 1)
    assert counts.nonzero().tolist() == [[1, 10], [3, 3], [4, 5]]
    assert classification_metrics(counts)["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("num_outputs", [10, 11, 1000])
def test_metrics_are_those_of_scikit_learn(num_outputs: int) -> None:
    """At any number of outputs, over several batches."""
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(NUM_CLASSES, (400,), generator=generator).tolist()
    # A third is right, a third another class or any output at all.
    others = torch.randint(num_outputs, (400,), generator=generator).tolist()
    predicted = [others[i] if i % 3 else target for i, target in enumerate(targets)]
    counts = counts_of(targets[:150], predicted[:150], num_outputs)
    counts += counts_of(targets[150:], predicted[150:], num_outputs)
    assert int(counts.sum()) == 400
    scores = precision_recall_fscore_support(
        targets, predicted, average="macro", zero_division=0, labels=range(NUM_CLASSES)
    )
    assert classification_metrics(counts) == pytest.approx(
        {
            "accuracy": accuracy_score(targets, predicted),
            **dict(zip(("precision", "recall", "f1"), scores[:3], strict=True)),
        }
    )


@pytest.mark.parametrize(
    ("targets", "predicted"),
    [
        ([0, 0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 1, 0]),
        ([0, 0, 1], [0, 0, 0]),  # the second class is never predicted
        ([0, 0, 0], [0, 1, 0]),  # or never occurs
    ],
)
def test_of_two_classes_the_second_is_the_positive_one(
    targets: list[int], predicted: list[int]
) -> None:
    """Where there is nothing to divide by, the figure is 0."""
    from sklearn.metrics import precision_recall_fscore_support

    outputs = one_hot(torch.tensor(predicted), 2).double()
    counts = confusion_counts(outputs, torch.tensor(targets), num_classes=2)[:-1]
    scores = precision_recall_fscore_support(targets, predicted, average="binary", zero_division=0)
    expected = dict(zip(("precision", "recall", "f1"), scores[:3], strict=True))
    found = classification_metrics(counts)
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_large_sets_are_counted_exactly() -> None:
    """In float32 a sample more than 2**24 would be lost."""
    counts = torch.tensor([[2**24 + 1, 1, 0], [0, 0, 0]])
    assert classification_metrics(counts)["accuracy"] == (2**24 + 1) / (2**24 + 2)


def test_classes_that_are_never_predicted_count_as_0() -> None:
    """They are part of the mean."""
    found = classification_metrics(counts_of([0, 1], [0, 0], NUM_CLASSES))
    assert found == pytest.approx({"accuracy": 0.5, "precision": 0.05, "recall": 0.1, "f1": 1 / 15})


def test_each_pixel_counts_as_a_sample_does() -> None:
    """Outputs (batch, classes, height, width) are counted like the same pixels in a row."""
    outputs = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(120).reshape(4, 5, 6) % 3
    flat = outputs.movedim(1, -1).reshape(-1, 3)
    expected = confusion_counts(flat, targets.flatten(), num_classes=3)
    assert torch.equal(confusion_counts(outputs, targets, num_classes=3), expected)


def test_a_target_of_minus_100_does_not_count() -> None:
    """Torch's cross_entropy ignores it, too."""
    counts = counts_of([1, -100, -100, 2], [1, 1, 2, 1], NUM_CLASSES)
    assert counts.nonzero().tolist() == [[1, 1], [2, 1]]


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [([0, 10], "has 1 target outside"), ([-1, 10, 3], "has 2 targets outside")],
)
def test_a_target_outside_the_classes_is_an_error(targets: list[int], sentence: str) -> None:
    """Its count would land in another class's row; it is told once all are counted."""
    outputs = torch.zeros(len(targets), NUM_CLASSES)
    counts = confusion_counts(outputs, torch.tensor(targets), num_classes=NUM_CLASSES)
    with pytest.raises(UserError, match=sentence):
        reject_strays(counts[-1, 0], num_classes=NUM_CLASSES)


def test_outputs_without_a_score_for_each_target_are_an_error() -> None:
    """One class for a whole picture is none for each pixel."""
    with pytest.raises(UserError, match="have no scores of classes for targets"):
        confusion_counts(torch.zeros(4, 3), torch.zeros(4, 5, 6).long(), num_classes=3)
