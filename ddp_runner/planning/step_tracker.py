"""Adds up what a rank's operators allocate, compute and send."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddp_runner.parallelism.shards import is_shard, own_part

# Of collectives; torch's names contain them, with other marks between the words.
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send")
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
        self._total = 0
        self.begin()

    def begin(self) -> None:
        """Begin a new step."""
        self.peak = self._total
        self.flops = 0.0
        self.calls, self.sent = Counter[Collective](), Counter[Collective]()

    def __enter__(self) -> Self:
        # FSDP frees by this method, which no operator and no hook reports.
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._set(storage._cdata, size)
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a DTensor: the operators of its local tensor come back here
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self.flops += flops / 2 if _named(func, args, kwargs).get("is_causal") else flops
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args, kwargs, result)
        for value in tensors_of(result):
            if not is_shard(value) and value.device.type != "meta":
                self._add(value.untyped_storage())
        return result

    def _count_collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.__name__.replace("_", "")
        kind = next((kind for kind in KINDS if kind.replace("-", "") in name), None)
        if kind is None:
            return  # such as a wait
        named = _named(func, args, kwargs)
        if (group := named.get("process_group")) is not None:
            group = dist.ProcessGroup.unbox(group)
        else:
            group = torch._C._distributed_c10d._resolve_process_group(named["group_name"])
        ranks = dist.get_process_group_ranks(group)
        collective = Collective(kind, len(ranks), min(ranks), max(ranks))
        self.calls[collective] += 1
        sizes = (sum(leaf.nbytes for leaf in tensors_of(part)) for part in (*args, result))
        self.sent[collective] += max(sizes)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            weakref.finalize(storage, self._drop, key)
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self._total += size - self._live.get(key, 0)
        self._live[key] = size
        self.peak = max(self.peak, self._total)

    def _drop(self, key: int) -> None:
        self._total -= self._live.pop(key)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@torch.no_grad()  # a shard's part is at hand only then; else autograd makes a view of it
def num_bytes(values: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's parts of tensors; storage that they share counts once."""
    storages = [own_part(value).untyped_storage() for value in values]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments that an operator got, by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
