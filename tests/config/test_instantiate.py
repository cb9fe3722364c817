"""What a config names is built with the keys beside it."""

import math

import pytest
import torch

from ddp_runner.config.instantiate import construct, make, make_function
from ddp_runner.errors import UserError

ALLOWED = ["math", "os"]


@pytest.mark.parametrize(
    ("target", "key", "hint"),
    [
        ("math.isclose", "rel_tl", "did you mean model.loss.rel_tol?"),
        ("math.isclose", "xyz", "it has a, abs_tol, b, rel_tol"),
        ("os.getcwd", "xyz", "it has none"),
    ],
)
def test_an_unknown_keyword_is_named_with_what_there_is(target: str, key: str, hint: str) -> None:
    """In one order, whatever Python's order of a set is."""
    with pytest.raises(UserError) as rejected:
        make_function({"_target_": target, key: 1}, key="model.loss", allowed=ALLOWED)
    assert str(rejected.value) == f"model.loss.{key} is not a keyword of {target}; {hint}"


def test_a_function_keeps_its_keywords() -> None:
    """It is called with them."""
    settings = {"_target_": "math.isclose", "rel_tol": 0.5}
    isclose = make_function(settings, key="model.loss", allowed=ALLOWED)
    assert isclose(1.0, 1.9)
    assert not math.isclose(1.0, 1.9)


def test_a_function_may_be_called_partial() -> None:
    """As Hydra's users write it; the key is no keyword."""
    settings = {"_target_": "math.isclose", "_partial_": True, "rel_tol": 0.5}
    assert make_function(settings, key="train.step", allowed=ALLOWED)(1.0, 1.9)


def test_a_dtype_is_named_as_in_python() -> None:
    """Another text stays a text."""
    given = {"a": "torch.float32", "b": ["torch.uint8"], "c": "torch.nn", "d": "torch.floaty"}
    built = construct(given, key="x")
    assert built == {"a": torch.float32, "b": [torch.uint8], "c": "torch.nn", "d": "torch.floaty"}


def test_what_fails_without_a_key_was_given_none() -> None:
    """Rather than a list of nothing."""
    with pytest.raises(UserError, match="its keys are none"):
        make("trackers.mine", {"_target_": "math.sqrt"}, kind=object, allowed=ALLOWED)
