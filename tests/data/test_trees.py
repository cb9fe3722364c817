"""Batches of any shape: moved to a device, walked through and described."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ddp_runner.data.trees import first_tensor, shape_of, tensors_of, to_device

META = torch.device("meta")  # another device that every machine has
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Boxes:
    """A user's batch of a type of its own."""

    corners: Tensor
    names: tuple[str, ...] = ()
    area: Tensor = field(init=False)  # computed from the others

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.corners.sum(dim=-1))


class Moving:
    """A user's batch that moves by itself."""

    def __init__(self, place: object = None) -> None:
        self.place = place

    def to(self, device: torch.device) -> "Moving":
        """Return a batch that notes where it is."""
        return Moving(device)


TENSORS = st.builds(torch.zeros, st.lists(st.integers(0, 2), max_size=2))
TREES = st.recursive(
    TENSORS | st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def leaves(tree: Any) -> list[Any]:
    """Return what a tree holds besides its containers, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


@examples(100)
@given(TREES)
def test_property_a_moved_tree_is_the_tree_elsewhere(tree: Any) -> None:
    """The containers keep their types, all tensors move, and all else stays as it is."""
    moved = to_device(tree, META)
    assert type(moved) is type(tree)
    assert len(leaves(moved)) == len(leaves(tree))
    for found, leaf in zip(leaves(moved), leaves(tree), strict=True):
        if isinstance(leaf, Tensor):
            assert (found.device, found.shape) == (META, leaf.shape)
        else:
            assert found is leaf
    assert shape_of(moved) == shape_of(tree)


@examples(100)
@given(TREES)
def test_property_each_tensor_is_found_once_in_order(tree: Any) -> None:
    """By identity: empty ones are equal to each other."""
    found = [tensor for _, tensor in tensors_of(tree)]
    expected = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
    assert list(map(id, found)) == list(map(id, expected))
    assert first_tensor(tree) is (expected[0] if expected else None)


def test_each_tensor_has_a_place_that_a_message_can_show() -> None:
    """Keys, indices and the fields of a dataclass, from the outside in."""
    tree = {"image": torch.zeros(1), "boxes": [Boxes(torch.ones(2, 4)), (torch.zeros(2), "a")]}
    assert [place for place, _ in tensors_of(tree)] == [
        "image",
        "boxes.0.corners",
        "boxes.0.area",
        "boxes.1.0",
    ]
    assert [place for place, _ in tensors_of(torch.zeros(1))] == [""]


def test_objects_of_other_types_move_whole() -> None:
    """A dataclass by its fields, others by their own method."""
    boxes = to_device(Boxes(torch.ones(2, 4), ("a", "b")), META)
    assert isinstance(boxes, Boxes)
    assert (boxes.corners.device, boxes.area.device, boxes.names) == (META, META, ("a", "b"))
    assert to_device([Moving()], META)[0].place == META
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert isinstance(packed, PackedSequence)
    assert packed.data.device == META
    assert to_device(OrderedDict(a=torch.zeros(1)), META)["a"].device == META
    assert to_device(Boxes, META) is Boxes  # the class itself is no batch


class Recording(Tensor):
    """A tensor that notes how it is moved, and stays where it is."""

    waits: list[bool]

    def to(self, *_: Any, non_blocking: bool = False) -> Any:
        """Note whether the caller would wait."""
        self.waits.append(not non_blocking)
        return self


def test_a_copy_to_the_cpu_waits() -> None:
    """It would be read before its values are there."""
    Recording.waits = []
    for place in (torch.device("cpu"), META):
        to_device(torch.ones(2, device=place).as_subclass(Recording), torch.device("cpu"))
    assert Recording.waits == [True, True]


def test_a_shape_in_words_names_every_part() -> None:
    """Also what is no tensor."""
    tree = {"image": torch.zeros(2, 3), "rest": [torch.zeros(4, dtype=torch.bool), "text", None]}
    assert shape_of(tree) == ("{image: (2, 3) of float32, rest: ((4,) of bool, a str, a NoneType)}")
