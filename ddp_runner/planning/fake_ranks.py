"""Ranks and tensors without memory: other ranks that do not exist, tensors that hold no numbers.

Only for a process of its own: the patches are of classes that all models share.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_runner.planning.step_tracker import tensors_of


class NumberlessTensors(FakeTensorMode):
    """Compute shapes and dtypes alone; an ``item`` is 1."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator without numbers, except on tensors that have some, as a mesh's."""
        if not types and func.namespace == "aten":
            inputs = tensors_of((args, kwargs))
            if inputs and not any(tensor.is_meta for tensor in inputs):
                with torch._C._DisableTorchDispatch():
                    return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:  # of Tensor.item
            return torch.ones((), dtype=args[0].dtype, device="cpu").numpy()[()].item()
        return super().dispatch(func, types, args, kwargs or {})


@contextmanager
def fake_ranks(world_size: int, *, rank: int) -> Iterator[None]:
    """Be one of many ranks, in place of the only one; each other rank sends what this rank sends.

    At the end the process is a group of its own again.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "_apply", _replace_tensors))
        stack.enter_context(patch.object(dist, "all_gather_object", _fill))
        # Numbers of another rank, which has none: each keeps its own.
        stack.enter_context(patch.object(dist, "broadcast_object_list", lambda *_, **__: None))
        if dist.is_initialized():
            dist.destroy_process_group()
            alone: Any = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            stack.callback(dist.init_process_group, "gloo", **alone)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        yield


def _fill(box: list[Any], value: Any, group: Any = None) -> None:
    box[:] = [value] * len(box)


@contextmanager
def optimizers_as_on_gpus() -> Iterator[None]:
    """Let an optimizer step whole parameters in one call, as on a GPU: it takes another copy.

    Shards are stepped one by one. A call for all saves no memory, and with fake tensors DTensor
    would think about it for a minute. No gradient overflows: an ``item`` of 1 would say so.
    """
    types = [Tensor, nn.Parameter, FakeTensor]
    with (
        patch.object(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
        patch.object(optimizer, "_foreach_supported_types", types),
        patch.object(torch.amp.GradScaler, "_maybe_opt_step", lambda _, one, *__: one.step()),
    ):
        yield


def _replace_tensors(
    module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Move a module; torch would swap the contents of tensors, and fakes have weak references."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for name, old in module._parameters.items():
            if old is not None and (new := fn(old)) is not old:
                module._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fn(buffer)
    return module
