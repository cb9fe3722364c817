"""Tests of the sentence about a tensor that is not one process's."""

import pytest
import torch

from ddp_runner.check.distances import Distance

SUM, MEAN = " (a sum where a mean belongs?)", " (a mean where a sum belongs?)"


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [(2.0, SUM), (4.0, SUM), (0.5, MEAN), (0.25, MEAN), (3.0, ""), (-2.0, "")],
)
def test_a_factor_that_is_a_number_of_ranks_or_shares_has_its_likely_cause(
    factor: float, meaning: str
) -> None:
    """Under ``fsdp_tp`` on four ranks there are two shares: either may be the factor."""
    expected = torch.tensor([1.0, -2.0, 3.0])
    distance = Distance(1e-6)
    distance.add(factor * expected, expected)
    assert distance.sentence({2, 4}) == f"is {factor:.3g} times one process's{meaning}"
    assert distance.sentence() == f"is {factor:.3g} times one process's"
