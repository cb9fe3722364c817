"""Batches as trees: tensors in tuples, lists, mappings and dataclasses, nested at will."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_runner.device import upload
from ddp_runner.errors import UserError, is_lost_peer, typed


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on the device; from the CPU without waiting.

    Objects with a method ``to`` of their own, such as a PackedSequence, move by it. Other leaves,
    such as texts and None, stay as they are.
    """
    if isinstance(tree, Tensor):
        return upload(tree, device) if tree.device.type == "cpu" else tree.to(device)
    if callable(getattr(tree, "to", None)):
        return tree.to(device)
    move = partial(to_device, device=device)
    if isinstance(tree, Mapping):
        return {key: move(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a namedtuple
        return type(tree)(*map(move, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map(move, tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [one.name for one in fields(tree) if one.init]
        return replace(tree, **{name: move(getattr(tree, name)) for name in names})
    return tree


def tensors_of(tree: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree in its order, each with its place: "image", "0.mask"."""
    if isinstance(tree, Tensor):
        yield place.lstrip("."), tree
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [(one.name, getattr(tree, one.name)) for one in fields(tree)]
    for key, part in parts:
        yield from tensors_of(part, f"{place}.{key}")


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a tree; None: it has none."""
    return next((tensor for _, tensor in tensors_of(tree)), None)


def inputs_of(data: Any) -> Any:
    """Return what of a batch the ordinary training step gives to the model."""
    return data[0] if isinstance(data, tuple | list) else data


def shape_of(tree: Any) -> str:
    """Return a tree's shapes and dtypes in words, for messages."""
    if isinstance(tree, Tensor) and not tree.is_nested:  # which has no shape
        return f"{tuple(tree.shape)} of {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {shape_of(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "(" + ", ".join(map(shape_of, tree)) + ")"
    return f"a {type(tree).__name__}"


@contextmanager
def taking(what: str, tree: Any, *, fix: str) -> Iterator[None]:
    """Say what cannot take a tree if the block, which computes on it, raises any exception.

    A lack of memory, or of another rank in a forward that waits for it, is no fault of the tree.

    Raises:
        UserError: with the tree's shapes, the exception's type and text, and the fix.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_lost_peer(error):
            raise
        raise UserError(f"{what} {shape_of(tree)}: {typed(error)}; {fix}") from error
