"""Compares states between ranks by their digests, and gets them ready to be sent."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def on_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(on_cpu, state))
    return state


def digest_of(state: Any) -> str:
    """Return a digest of plain data and tensors; equal states have equal ones."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(state):
        digest.update(leaf)
    return digest.hexdigest()


def _leaves(state: Any) -> Iterator[bytes | memoryview]:
    if isinstance(state, Tensor):
        dense = state.detach().to_dense().cpu().contiguous()
        yield f"{tuple(dense.shape)} {dense.dtype}".encode()
        yield dense.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield repr(key).encode()
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        yield str(len(state)).encode()
        for value in state:
            yield from _leaves(value)
    else:
        yield repr(state).encode()
