"""What DDP sends of the gradients: rounded to 16 bits, or what a function of the user's own makes.

The hooks are torch's; see https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
"""

from collections.abc import Callable
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

OwnHook = Callable[[None, dist.GradBucket], Future[Tensor]]


def bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Send a bucket as bfloat16.

    DDP refuses torch's hook, by its name, where torch lacks NCCL; but gloo sends bfloat16, too.
    """
    return default_hooks.bf16_compress_hook(_all_ranks_if_none(group), bucket)


def fp16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Send a bucket as float16."""
    return default_hooks.fp16_compress_hook(_all_ranks_if_none(group), bucket)


def _all_ranks_if_none(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group as torch's hooks declare it: they take None for all ranks as well."""
    return cast(dist.ProcessGroup, group)


def own(hook: OwnHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """Call the user's hook as torch's: with a state of None, for all ranks, and the bucket.

    DDP asks a hook for the name of a function, which an object that can be called has not.
    """
    return hook(None, bucket)


ROUNDING = {"bf16": bf16, "fp16": fp16}
ITEM_BYTES = 2  # of what these send
