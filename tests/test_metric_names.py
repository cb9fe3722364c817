"""What is not listed is the user's own metric: it is shown, and its best end is known."""

import pytest

from ddp_runner.metric_names import MOST_OWN, best_end, headlines

DIRECTIONS = {"eval/top": "min", "eval/top_k": "max"}


def test_own_metrics_follow_the_listed_headlines() -> None:
    """In their own order; what no evaluation gives stays a detail."""
    names = ["eval/mine", "train/mine", "eval/precision", "eval/loss", "best/mine", "eval/accuracy"]
    assert headlines(names) == ["eval/accuracy", "eval/loss", "eval/mine", "best/mine"]


def test_a_number_for_each_class_does_not_fill_the_terminal() -> None:
    """Of many only the first ones are headlines."""
    names = [f"eval/recall_{label}" for label in range(1000)]
    assert headlines(names) == names[:MOST_OWN]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eval/accuracy", "max"),
        ("eval/loss", "min"),
        ("train/lr", None),
        ("eval/my_loss", "min"),
        ("eval/mine", None),
        ("eval/top", "min"),
        ("eval/top_5", "min"),
        ("eval/top_k", "max"),
        ("best/top_k", "max"),
        ("eval/top_k_2", "max"),
        ("eval/topmost", None),
        ("train/top", None),
    ],
)
def test_the_best_end_is_what_the_metrics_class_says(name: str, expected: str | None) -> None:
    """The numbers of a mapping go with their metric, whose name is the longest that fits."""
    assert best_end(name, DIRECTIONS) == expected
