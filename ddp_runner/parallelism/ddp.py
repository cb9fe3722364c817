"""DistributedDataParallel: each rank has a replica, and backward averages the gradients.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
and, for replicas that span several devices,
https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
What DDP sends: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.parallelism.single import Single

MIN_BUCKET_MB = 2**-20  # a bucket per gradient, as 0 means; torch 2.11 rejects 0
CommHook = Callable[[Any, dist.GradBucket], Future[Tensor]]
ROUNDING: Mapping[str, CommHook] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


@dataclass(frozen=True)
class DDP(Single):
    """A replica per rank, on one device or cut into stages on ``devices_per_rank`` devices."""

    bucket_cap_mb: float
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool
    devices_per_rank: int = 1
    sync_batchnorm: bool = False
    comm_hook: str | CommHook | None = None  # bf16, fp16, or the user's function

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model on this rank's device, or let it place its stages on several."""
        if self.devices_per_rank == 1:
            module = build().to(devices[0])
        else:
            module = build(**{f"dev{stage}": device for stage, device in enumerate(devices)})
        return nn.SyncBatchNorm.convert_sync_batchnorm(module) if self.sync_batchnorm else module

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the model under DDP, with rank 0's weights. Collective: every rank must call."""
        # A model of several stages moves its activations, so DDP must not move its inputs.
        moves_inputs = self.devices_per_rank == 1 and devices[0].type != "cpu"
        parameters = inspect.signature(DistributedDataParallel).parameters
        # Newer versions of torch renamed broadcast_buffers.
        is_renamed = "forward_sync_buffers" in parameters
        sync_key = "forward_sync_buffers" if is_renamed else "broadcast_buffers"
        settings: dict[str, Any] = {sync_key: self.forward_sync_buffers}
        model = DistributedDataParallel(
            module,
            device_ids=[devices[0]] if moves_inputs else None,
            bucket_cap_mb=self.bucket_cap_mb or MIN_BUCKET_MB,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,  # saves one copy of the gradients
            **settings,
        )
        hook = ROUNDING[self.comm_hook] if isinstance(self.comm_hook, str) else self.comm_hook
        if hook is None and any(getattr(part, "sparse", False) for part in module.modules()):
            hook = average
        if hook is not None:
            model.register_comm_hook(hook, send)
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's context: the next backward outside it reduces the accumulated gradients.

        Raises:
            TypeError: the model is not the result of ``wrap``.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"no_sync needs the model that wrap returned, not {type(model)}")
        return model.no_sync()


def average(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean of a bucket over the ranks, and wait for it.

    With sparse and dense gradients over gloo, DDP divides the dense gradients twice unless each
    bucket waits for the last; seen with torch 2.15.
    """
    total, averaged = bucket.buffer(), Future[Tensor]()
    dist.all_reduce(total)
    averaged.set_result(total.div_(dist.get_world_size()))
    return averaged


def send(hook: CommHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """Call a hook with a state of None, which means all ranks in torch's hooks.

    DDP reads a hook's ``__name__``, which a callable object lacks, and rejects torch's bf16 hook by
    its name where torch lacks NCCL; but gloo sends bfloat16, too.
    """
    return hook(None, bucket)
