"""Objects sent through a pipe, with their tensors in memory that both processes map.

The sender keeps its blocks of memory, and writes into one again when the receiver has dropped all
tensors in it. So neither maps new memory for each batch, and the receiver copies nothing. Only
Linux has such memory without a name; elsewhere the tensors go through the pipe.
"""

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Iterable
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: where a tensor may begin in a block
MOST_INLINE = 16 * 2**10  # bytes that are sent through the pipe, which holds a few times as many
HAS_BLOCKS = hasattr(os, "memfd_create")
Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]  # offset, dtype, shape, strides


class BlockSender:
    """Sends objects to the process at the other end of a pipe, its parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._num_blocks = pipe, 0
        self._blocks = dict[int, mmap.mmap]()
        self._free = set[int]()

    def release(self, blocks: Iterable[int]) -> None:
        """Note that the receiver has dropped what these blocks held."""
        self._free.update(blocks)

    def send(self, ticket: int, value: Any) -> None:
        """Send an object that can be pickled; where there are blocks, without waiting."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        size, pickled = pickler.size, file.getvalue()
        rest: bytes | range = pickled  # all but the tensors, or its place in the block
        if HAS_BLOCKS and len(pickled) > MOST_INLINE:
            rest = range(size, size + len(pickled))
            size = rest.stop
        block = fd = None
        dropped = list[int]()
        if size:
            block = self._fitting(size)
            if block is None:
                dropped = list(self._free)  # too small, as the next batches will show again
                block, fd = self._new(size, instead_of=dropped)
            self._free.discard(block)
            memory = memoryview(self._blocks[block])
            for tensor, place in pickler.tensors:
                _tensor(memory, place).copy_(tensor)
            if isinstance(rest, range):
                memory[rest.start : rest.stop] = pickled
        self._pipe.send((ticket, block, fd is not None, dropped, rest))
        if fd is not None:
            send_handle(self._pipe, fd, os.getppid())
            os.close(fd)

    def _fitting(self, size: int) -> int | None:
        return next((one for one in self._free if len(self._blocks[one]) >= size), None)

    def _new(self, size: int, *, instead_of: Iterable[int]) -> tuple[int, int]:
        for one in instead_of:
            del self._blocks[one]
        self._free.clear()
        self._num_blocks += 1
        fd = os.memfd_create("batch")
        # Twice as large as it need be at most, for larger batches; memory is taken only when used.
        os.truncate(fd, 1 << (size - 1).bit_length())
        self._blocks[self._num_blocks] = mmap.mmap(fd, 0)
        return self._num_blocks, fd


class BlockReceiver:
    """Receives what a ``BlockSender`` sends."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._blocks = dict[int, mmap.mmap]()
        self._in_use = dict[int, weakref.ref[memoryview]]()
        self._dropped = list[int]()

    def take_dropped(self) -> list[int]:
        """Return the blocks whose tensors have been dropped since the last call."""
        # Tensors may be dropped in other threads, as autograd's, at any time.
        return [self._dropped.pop() for _ in range(len(self._dropped))]

    def receive(self) -> tuple[int, Any]:
        """Wait for an object; return its ticket and the object.

        Raises:
            EOFError: the sender has ended, or OSError.
        """
        ticket, block, is_new, gone, rest = self._pipe.recv()
        for one in gone:
            del self._blocks[one]
        if is_new:
            fd = recv_handle(self._pipe)
            self._blocks[block] = mmap.mmap(fd, 0)
            os.close(fd)
        memory = None
        if block is not None:
            memory = memoryview(self._blocks[block])  # which its tensors keep alive
            dropped = self._dropped
            self._in_use[block] = weakref.ref(memory, lambda _: dropped.append(block))
            if isinstance(rest, range):
                rest = memory[rest.start : rest.stop]
        return ticket, _Unpickler(io.BytesIO(rest), memory).load()


class _Pickler(pickle.Pickler):
    """Pickles all but the tensors, and gives each of these a place in a block."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.size, self.tensors = 0, list[tuple[Tensor, Place]]()

    def persistent_id(self, value: Any) -> Place | None:
        """Return the place of a tensor; None: pickle the value."""
        if type(value) is not Tensor or not HAS_BLOCKS or not _is_plain(value) or not value.numel():
            return None
        # Strides as of a copy: those of the tensor without what it skips or repeats.
        strides = torch.empty_like(value, device="meta").stride()
        place = (self.size, value.dtype, tuple(value.shape), strides)
        self.tensors.append((value, place))
        self.size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        return place


class _Unpickler(pickle.Unpickler):
    """Finds the tensors in a block."""

    def __init__(self, file: io.BytesIO, memory: memoryview | None) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, place: Place) -> Tensor:
        """Return the tensor at a place."""
        assert self._memory is not None
        return _tensor(self._memory, place)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether bytes, dtype and strides are all there is to a tensor."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_lazy = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return is_dense and not is_lazy and not tensor.requires_grad


def _tensor(memory: memoryview, place: Place) -> Tensor:
    """Return the tensor at a place of a block; it keeps `memory` alive, as does each view of it."""
    offset, dtype, shape, strides = place
    flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset)
    # Not a view of `flat`, which autograd would treat otherwise than a batch that was just loaded.
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)
