"""The same bytes at every world size: each step has the parts of a fixed number of virtual ranks.

A rank computes its parts one after the other, each with the random numbers of its virtual rank.
Everything that is summed over parts has the order of one tree: see ``tree``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_runner.device import sum_dtype, upload
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import broadcast_tensors
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Engine, Layout, Mode, Sums
from ddp_runner.parallelism.shards import has_shards, is_shard
from ddp_runner.parallelism.tree import Leaf, Tree, TreeReducer, add_leaf
from ddp_runner.seeds import seed_all

Owner = tuple[nn.Module, str]  # a buffer's module, and its name there


@dataclass(frozen=True)
class VirtualRanks:
    """A mode whose ranks compute the parts of virtual ranks: the key ``batch.virtual_ranks``."""

    mode: Mode
    tree: Tree

    def layout(self, env: DistEnv) -> Layout:
        """Return a rank's part: neighbouring shares."""
        num_own = self.tree.count // env.world_size
        return replace(
            self.mode.layout(env),
            share=env.rank * num_own,
            num_shares=self.tree.count,
            shares_per_rank=num_own,
            backward_is_collective=False,
        )

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model as the mode does. Collective: every rank must call."""
        return self.mode.place(build, devices)

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the model with rank 0's weights. Collective: every rank must call.

        Without shards no other object sends them, and the engine reduces the gradients.

        Raises:
            UserError: a layer of the model adds over ranks itself.
        """
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise UserError(
                    f"batch.virtual_ranks adds everything in one order, and "
                    f"{name or 'the model'} is a SyncBatchNorm, which adds over ranks itself",
                    "use BatchNorm in the model, or write batch.virtual_ranks=null",
                )
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_shard(tensor):
                broadcast_tensors([tensor])  # one by one: together they are a copy of the model
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the mode's context under FSDP2; no other mode reduces in a backward here."""
        return self.mode.no_sync(model) if has_shards(model) else nullcontext()

    def engine(self, state: Any, local: Engine[Any, Any]) -> "TreeEngine":
        """Return the engine that adds the parts."""
        return TreeEngine(local, self.tree)


def with_virtual_ranks(mode: Mode, count: int | None) -> Mode:
    """Return the mode with `count` virtual ranks, a power of two; None: the mode itself."""
    if count is None:
        return mode
    tree = Tree(count)
    # A mode that splits the model reduces the gradients of its shards itself.
    adding_in = getattr(mode, "adding_in", None)
    return VirtualRanks(mode if adding_in is None else adding_in(tree), tree)


class TreeEngine(Engine[Any, Any]):
    """Computes this rank's parts of a step, and adds the parts of all ranks in the tree."""

    def __init__(self, local: Engine[Any, Any], tree: Tree) -> None:
        self._local, self._tree, self._reducer = local, tree, TreeReducer()

    def backward(self, state: Any, batch: Any) -> Sums:
        """Leave the mean gradients in the module. Collective: every rank must call.

        Raises:
            UserError: a gradient is sparse.
        """
        layout, module, count = state.work.layout, state.module, self._tree.count
        whole = [p for p in module.parameters() if p.requires_grad and not is_shard(p)]
        buffers, stack = _Buffers(module, state.changing), list[Leaf]()
        for index, part in enumerate(self._parts(state, batch)):
            if index:
                buffers.rewind()
            module.zero_grad(set_to_none=True)
            seed_all(state.work.config.seed, "step", state.step, layout.share + index)
            sums = self._local.backward(state, part)
            gradients = [parameter.grad for parameter in whole]
            num_samples = sum(micro.num_samples * micro.weight for micro in part.micro_batches)
            changes = buffers.changes(weight=num_samples * count / batch.global_count)
            numbers = _numbers(sums, gradients).mul_(count)
            add_leaf(stack, [*gradients, *changes, numbers], index=index)
        (total,) = stack
        like = [*whole, *buffers.statistics, numbers]
        means = self._reducer.mean(total, like, count=count)
        if not layout.forward_is_collective:
            state.timer.mark(StepPart.COMM)
        buffers.finish(means[len(whole) : -1])
        loss, tokens, *others = means[-1]
        is_used = others[len(sums.scalars) :]
        for number, parameter in enumerate(whole):
            # None, not zero: with a zero gradient the optimizer would decay an unused parameter.
            is_set = total[number] is not None or bool(is_used[number])
            parameter.grad = means[number] if is_set else None
        if layout.share:  # the loop adds the sums of all ranks
            loss, tokens, *others = torch.zeros_like(means[-1])
        scalars = dict(zip(sums.scalars, others, strict=False))
        return Sums([loss], None if sums.tokens is None else tokens.float(), scalars)

    def _parts(self, state: Any, batch: Any) -> Iterator[Any]:
        """Yield this rank's parts of a batch, each at its place in the tree."""
        num_parts = state.work.layout.shares_per_rank
        size = len(batch.micro_batches) // num_parts
        for index in range(num_parts):
            self._tree.index, self._tree.is_last = index, index == num_parts - 1
            yield batch._replace(micro_batches=batch.micro_batches[index * size :][:size])


def _numbers(sums: Sums, gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a part's loss, tokens and scalars, and 1 for each gradient that it has, else 0.

    Raises:
        UserError: a gradient is sparse.
    """
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        raise UserError(
            "batch.virtual_ranks adds dense gradients, and this model has sparse ones",
            "leave out sparse=True in the model, or write batch.virtual_ranks=null",
        )
    loss, dtype = sums.loss, sum_dtype(sums.loss.device)
    tokens = torch.zeros_like(loss) if sums.tokens is None else sums.tokens
    values = [value.to(loss.device, dtype) for value in (loss, tokens, *sums.scalars.values())]
    is_used = torch.tensor([gradient is not None for gradient in gradients], dtype=dtype)
    return torch.cat([torch.stack(values), upload(is_used, loss.device)])


class _Buffers:
    """The buffers that a step changes: each part begins with the same values.

    After the step, BatchNorm's running statistics have changed by the mean of the parts' changes.
    Any other buffer has the value of the rank's first part; rank 0's value is used, as under DDP.
    """

    def __init__(self, module: nn.Module, changing: Sequence[Owner]) -> None:
        self._averaged, counters = list[Owner](), list[Owner]()
        for part in module.modules():
            if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
                self._averaged += [(part, "running_mean"), (part, "running_var")]
                counters.append((part, "num_batches_tracked"))
        present = [owner for owner in changing if getattr(*owner) is not None]
        self._owners = [*dict.fromkeys([*self._averaged, *counters, *present])]
        self._before = self._copies()
        self._first: list[Tensor] | None = None  # after the first part, if others follow

    @property
    def statistics(self) -> list[Tensor]:
        """BatchNorm's running means and variances."""
        return [getattr(module, name) for module, name in self._averaged]

    def rewind(self) -> None:
        """Restore the values from before the step."""
        self._first = self._first or self._copies()
        self._set(self._before)

    def changes(self, *, weight: float) -> list[Tensor]:
        """Return the part's changes of the ``statistics``, times its weight."""
        pairs = zip(self.statistics, self._before, strict=False)
        return [(value - before).mul_(weight) for value, before in pairs]

    def finish(self, changes: Sequence[Tensor]) -> None:
        """Set the values after the step, with the mean `changes` of the ``statistics``."""
        after = self._first or self._copies()
        averaged = [b + change for b, change in zip(self._before, changes, strict=False)]
        self._set([*averaged, *after[len(averaged) :]])

    def _copies(self) -> list[Tensor]:
        return [getattr(module, name).detach().clone() for module, name in self._owners]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for (module, name), value in zip(self._owners, values, strict=True):
            getattr(module, name).copy_(value)
