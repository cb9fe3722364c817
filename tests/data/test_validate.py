"""A user's source whose data cannot be trained on is answered in one sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_runner.data.dataset import KEYS, Dataset, splits
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.errors import UserError

GOOD = {
    "train_inputs": torch.zeros(4, 3),
    "train_targets": torch.tensor([0, 1, 2, 1]),
    "eval_inputs": torch.zeros(2, 3),
    "eval_targets": torch.tensor([0, 2]),
}


@dataclass(frozen=True)
class Own:
    """A source whose build returns its field."""

    built: Any
    num_classes: int | None = 3
    made: Any = None  # by `dataset`; None: a Dataset
    name: str = "own"

    def fingerprint(self, data_root: Path) -> None:
        """None: nothing is cached."""

    def build(self, data_root: Path) -> Any:
        """Return it."""
        return self.built

    def dataset(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return a dataset of it."""
        return self.made or Dataset(self.name, *splits(tensors), num_classes=self.num_classes)


class Cached(Own):
    """The same source with a cache."""

    def fingerprint(self, data_root: Path) -> Any:
        """Nothing varies."""
        return {"cached": 1}


def changed(**tensors: Any) -> dict[str, Any]:
    """Return valid tensors with changes; None removes a key."""
    return {key: one for key, one in (GOOD | tensors).items() if one is not None}


INVALID: dict[str, tuple[Any, str]] = {
    "no eval targets": (Own(changed(eval_targets=None)), "returned no eval_targets; return"),
    "nothing": (Own(None), "returned NoneType; return a mapping with train_inputs, "),
    "dict inputs": (Own(changed(train_inputs={"ids": 1})), "returned a dict as train_inputs"),
    "no Dataset": (Own(GOOD, made=GOOD), "dataset=own made a dict; return a ddp_runner"),
    "fewer targets": (
        Own(changed(train_targets=torch.tensor([0]))),
        "has 4 train inputs and 1 train targets",
    ),
    "no samples": (
        Own(changed(eval_inputs=torch.zeros(0, 3), eval_targets=torch.zeros(0).long())),
        "has 0 eval inputs",
    ),
    "float classes": (
        Own(changed(train_targets=torch.zeros(4))),
        "the train targets of dataset=own are float32 of shape (4,); give int64 for 3 classes",
    ),
    "counted from one": (
        Own(changed(eval_targets=torch.tensor([1, 3]))),
        "the eval targets of dataset=own go from 1 to 3; number 3 classes from 0 to 2",
    ),
    "negative": (Own(changed(train_targets=torch.tensor([0, 1, -1, 2]))), "go from -1 to 2"),
}


@pytest.mark.parametrize("name", INVALID)
def test_each_mistake_is_one_sentence(name: str, tmp_path: Path) -> None:
    """The sentence has the dataset, the split and the fault."""
    source, part = INVALID[name]
    with pytest.raises(UserError) as error:
        load_dataset(source, data_root=tmp_path, log=print)
    assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_what_can_be_trained_on_is_loaded(tmp_path: Path) -> None:
    """Classes from 0, or float targets without classes."""
    assert len(load_dataset(Own(GOOD), data_root=tmp_path, log=print).train) == 4
    regression = Own(changed(train_targets=torch.rand(4, 2)), num_classes=None)
    assert load_dataset(regression, data_root=tmp_path, log=print).num_classes is None


def test_a_build_that_lacks_a_key_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrected source is built again."""
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="returned no eval_inputs"):
        load_dataset(Cached(changed(eval_inputs=None)), data_root=tmp_path, log=print)
    assert sorted(KEYS) == sorted(GOOD)
    assert len(load_dataset(Cached(GOOD), data_root=tmp_path, log=print).eval) == 2
