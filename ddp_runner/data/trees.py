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
    """Return the tree with its tensors on the device; copies from the CPU do not wait.

    Objects with a method ``to``, such as a PackedSequence, move by it. Other leaves, such as texts
    and None, stay.
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
        names = [field.name for field in fields(tree) if field.init]
        return replace(tree, **{name: move(getattr(tree, name)) for name in names})
    return tree


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree in its order, each with its path: "image", "0.mask"."""
    if isinstance(tree, Tensor):
        yield path.lstrip("."), tree
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    for key, part in parts:
        yield from tensors_of(part, f"{path}.{key}")


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a tree, or None."""
    if isinstance(tree, Tensor):
        return tree
    return next((tensor for _, tensor in tensors_of(tree)), None)


def inputs_of(data: Any) -> Any:
    """Return the part of a batch that the default training step passes to the model."""
    return data[0] if isinstance(data, tuple | list) else data


def shape_of(tree: Any) -> str:
    """Return a tree's shapes and dtypes in words, for messages."""
    if isinstance(tree, Tensor) and not tree.is_nested:  # a nested tensor has no shape
        return f"{tuple(tree.shape)} of {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {shape_of(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "(" + ", ".join(map(shape_of, tree)) + ")"
    return f"a {type(tree).__name__}"


@contextmanager
def shapes_on_failure(subject: str, tree: Any, *, fix: str) -> Iterator[None]:
    """Raise a UserError with the tree's shapes if the block, which computes on it, fails.

    Running out of memory, or losing another rank in a collective, is not the tree's fault.

    Raises:
        UserError: subject, shapes, the exception's type and text, and the fix.
    """
    try:
        yield
    except Exception as error:  # the model and the step are the user's code
        if isinstance(error, UserError | torch.OutOfMemoryError) or is_lost_peer(error):
            raise
        raise UserError(f"{subject} {shape_of(tree)}: {typed(error)}", fix) from error
