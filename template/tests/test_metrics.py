"""The metric finds the worst class."""

import pytest
import torch

from my_project.metrics import WorstClass


def test_the_worst_class_decides() -> None:
    """Class 0 is right twice out of two, class 1 once out of three; class 2 is never seen."""
    metric = WorstClass(num_classes=3)
    outputs = torch.eye(3)[[0, 0, 1, 0, 2]]
    metric.update(outputs[:2], torch.tensor([0, 0]))
    metric.update(outputs[2:], torch.tensor([1, 1, 1]))
    assert metric.compute() == pytest.approx(1 / 3)
