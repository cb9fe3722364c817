"""Adds up what a rank's operators allocate, compute and send."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddp_runner.parallelism.shards import is_shard, own_part

KINDS = {  # of collectives, by a part of torch's names for them without underscores
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
}
DEVICE = torch.ops.prim.device.default  # autograd asks fake tensors for it, more than anything else


@dataclass(frozen=True, order=True)
class Collective:
    """A kind of collective, and the group that it runs over."""

    kind: str
    group_size: int
    first: int  # rank of the group, and its last
    last: int


class StepTracker(TorchDispatchMode):
    """Tracks the bytes of live storages; since the last ``begin`` the peak, FLOP and collectives.

    Attributes:
        peak: most live bytes.
        flops: of matrix products, convolutions and attention; causal attention counts half.
        calls: number of each collective.
        sent: bytes of the whole messages of each collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no types
        self._live: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._total = 0
        self.begin()

    def begin(self) -> None:
        """Begin a new step."""
        self.peak = self._total
        self.flops = 0.0
        self.calls, self.sent = Counter[Collective](), Counter[Collective]()

    def __enter__(self) -> Self:
        """Track; FSDP frees by ``resize_``, which is no operator."""
        tracker, self._resize = self, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = tracker._resize(storage, size)
            if storage._cdata in tracker._live:
                tracker._set(storage._cdata, size)
            return result

        # No operator and no hook reports it, so the method itself is replaced meanwhile.
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Track no longer."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator, and count it."""
        if func is DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a DTensor: the operators of its local tensor come back here
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self.flops += flops / 2 if _argument(func, args, kwargs, "is_causal") else flops
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args, kwargs, result)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and not is_shard(leaf) and leaf.device.type != "meta":
                self._add(leaf.untyped_storage())
        return result

    def _count_collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.__name__.replace("_", "")
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        if kind is None:
            return  # such as a wait
        group = _argument(func, args, kwargs, "process_group")
        if group is None:
            name = _argument(func, args, kwargs, "group_name")
            group = torch._C._distributed_c10d._resolve_process_group(name)
        else:
            group = dist.ProcessGroup.unbox(group)
        ranks = dist.get_process_group_ranks(group)
        collective = Collective(kind, len(ranks), min(ranks), max(ranks))
        self.calls[collective] += 1
        sizes = (sum(leaf.nbytes for leaf in tensors(part)) for part in (*args, result))
        self.sent[collective] += max(sizes)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._refs[key] = weakref.ref(storage, lambda _: self._drop(key))
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self._total += size - self._live.get(key, 0)
        self._live[key] = size
        self.peak = max(self.peak, self._total)

    def _drop(self, key: int) -> None:
        self._total -= self._live.pop(key)
        del self._refs[key]


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def num_bytes(values: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's parts of tensors; storage that they share counts once."""
    storages = [own_part(value).untyped_storage() for value in values]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an operator's argument by its name; None if it has none with this name."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None
