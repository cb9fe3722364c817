"""Sums in the order of one binary tree over the parts of a step, on any number of ranks.

The order is ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). A rank has neighbouring parts, so the lower
levels lie within ranks, the upper levels between them. Numbers of ranks that are powers of two cut
the tree at another level, and change no bit of the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ddp_runner.device import has_streams

BUCKET_BYTES = 25 * 2**20  # tensors that are sent together
NEGATIVE_ZERO = -0.0  # adding it changes no bit of any number; 0.0 changes -0.0
Leaf = list[Tensor | None]  # a part's tensors; None counts as nothing


@dataclass
class Tree:
    """A step's place in the tree."""

    count: int  # parts of all ranks, a power of two
    index: int = 0  # the part that this rank computes, from 0
    is_last: bool = True  # it is this rank's last part of the step


def add_leaf(stack: list[Leaf], leaf: Leaf, *, index: int) -> None:
    """Add a part to this rank's partial sums, in place, as a binary counter adds 1.

    `index` counts the leaves from 0. After a power of two the stack has one item, their sum.
    """
    while index & 1:
        left, index = stack.pop(), index >> 1
        pairs = [(a, b) for a, b in zip(left, leaf, strict=True) if a is not None and b is not None]
        if pairs:
            torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
        leaf = [b if a is None else a for a, b in zip(left, leaf, strict=True)]
    stack.append(leaf)


def fold(rows: Tensor) -> Tensor:
    """Return the sum of the rows (ranks, n), a power of two of them, in the tree: a vector (n,)."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def own_chunk(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's chunk of a vector that is summed over the group's ranks. Collective.

    The number of ranks is a power of two and divides the length.
    """
    parts = torch.empty_like(values)
    dist.all_to_all_single(parts, values, group=group)
    return fold(parts.view(dist.get_world_size(group), -1))


class TreeReducer:
    """Adds tensors over all ranks in the tree, in the bytes of a ring all-reduce.

    It keeps its buffers from step to step, since new memory costs more time than adding. So the
    gradients are views of them until the next call.
    """

    def __init__(self) -> None:
        self._buffers = dict[object, Tensor]()

    def mean(self, sums: Leaf, like: Sequence[Tensor], *, count: int) -> list[Tensor]:
        """Return the means over all parts, until the next call. Collective: every rank must call.

        The sums are those of this rank's parts, and `count` the parts of all ranks. The tensors of
        `like` have the sums' shapes, dtypes, devices and memory formats.
        """
        size = dist.get_world_size()
        if size == 1:
            pairs = zip(sums, like, strict=True)
            return [other if value is None else value.div_(count) for value, other in pairs]
        means = list(like)
        buckets, _ = dist._compute_bucket_assignment_by_size([*like], [BUCKET_BYTES])
        for index, numbers in enumerate(buckets):
            tensors = [like[number] for number in numbers]
            length = -(-sum(map(Tensor.numel, tensors)) // size) * size
            sent, received, total = (
                self._buffer(key, tensors[0], length) for key in ("sent", "received", index)
            )
            for number, target in zip(numbers, _views(sent, tensors), strict=True):
                value = sums[number]
                target.fill_(NEGATIVE_ZERO) if value is None else target.copy_(value)
            dist.all_to_all_single(received, sent)
            chunk = fold(received.view(size, -1)).div_(count)
            # Twice as fast as gloo's all-gather.
            sent.view(size, -1).copy_(chunk)
            dist.all_to_all_single(total, sent)
            for number, mean in zip(numbers, _views(total, tensors), strict=True):
                means[number] = mean
        return means

    def _buffer(self, name: str | int, like: Tensor, length: int) -> Tensor:
        key = name, like.dtype, like.device
        if key not in self._buffers or len(self._buffers[key]) < length:
            self._buffers[key] = torch.zeros(length, dtype=like.dtype, device=like.device)
        return self._buffers[key][:length]


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector with the shapes and the memory formats of the tensors."""
    sizes = [*map(Tensor.numel, tensors)]
    parts = flat[: sum(sizes)].split(sizes)
    dense = (torch.empty_like(tensor, device="meta") for tensor in tensors)
    return [part.as_strided(t.shape, t.stride()) for part, t in zip(parts, dense, strict=True)]


class TreeReduceScatter:
    """Adds the gradients of an FSDP2 group in the tree, and keeps this rank's shard of the mean.

    FSDP2 calls it in the backward of each part. Its parameters get zeros until the last part.

    `replicas` are the ranks with the same shard (HSDP); None: each shard exists once.
    """

    allocate = staticmethod(torch.empty)  # as FSDP2 asks for buffers

    def __init__(self, tree: Tree, replicas: dist.ProcessGroup | None) -> None:
        self._tree, self._replicas, self._stack = tree, replicas, list[Leaf]()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object = None,
        async_op: bool = False,
    ) -> None:
        """Add a part; after the last, fill the output with this rank's shard. Collective."""
        if has_streams(input_tensor.device):  # FSDP2 allocates on another stream than this one
            stream = torch.accelerator.current_stream(input_tensor.device)
            input_tensor.record_stream(stream)
        if self._tree.index == 0:
            self._stack.clear()  # an earlier step may have failed
        add_leaf(self._stack, [input_tensor], index=self._tree.index)
        if not self._tree.is_last:
            output_tensor.zero_()
            return
        (total,) = self._stack.pop()
        assert total is not None
        shard = own_chunk(total, group)
        if (replicas := self._replicas) is not None:
            padded = pad(shard, (0, -len(shard) % replicas.size()))
            gathered = torch.empty_like(padded)
            dist.all_gather_into_tensor(gathered, own_chunk(padded, replicas), group=replicas)
            shard = gathered[: len(shard)]
        torch.div(shard, self._tree.count, out=output_tensor)
