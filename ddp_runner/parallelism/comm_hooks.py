"""What DDP sends of the gradients: rounded to 16 bits, or as products of two thin matrices.

The hooks are torch's; see https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html and, for
PowerSGD, https://arxiv.org/abs/1905.13727. Gradients arrive equal on all ranks, but inexact.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # of PowerSGDState: bucket -> tensor


class PowerSGD:
    """The state of PowerSGD on a rank: what it has not sent yet, and the matrices to begin with."""

    replicas_differ = False
    lost = "PowerSGD begins with new matrices and drops the gradients that it had not sent yet"

    def __init__(
        self, *, rank: int, start_step: int, layout: Mapping[str, Any], device: torch.device
    ) -> None:
        """Begin at step 0.

        Args:
            rank: of the matrices.
            start_step: the first step that is compressed, counted from 0.
            layout: what decides how DDP puts gradients into buckets.
            device: of the gradients.
        """
        self.settings = {"matrix_approximation_rank": rank, **layout}
        self._rank, self._start_step, self._device = rank, start_step, device
        self.begin_at(0)

    def begin_at(self, step: int) -> None:
        """Begin anew; torch counts the steps in `iter`."""
        self.own = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=self._rank, start_powerSGD_iter=self._start_step
        )
        self.own.iter = step

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its random numbers are drawn only for the first matrices."""
        return {"iter": self.own.iter, **{name: getattr(self.own, name) for name in MEMORIES}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.begin_at(state["iter"])
        for name in MEMORIES:
            moved = {bucket: one.to(self._device) for bucket, one in state[name].items()}
            setattr(self.own, name, moved)

    def step_done(self) -> None:
        """Do nothing: all ranks took the same step."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return an empty context: the ranks' weights are equal."""
        return nullcontext()


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


def powersgd(state: PowerSGD, bucket: dist.GradBucket) -> Future[Tensor]:
    """Send a bucket's matrices as products of two thin ones.

    torch's hook starts its second and third all-reduce from callbacks. On the CPU these run in the
    threads of gloo, so ranks may start the collectives of several buckets in different orders and
    fail. There each bucket waits for its last all-reduce.
    """
    result = powerSGD_hook.powerSGD_hook(state.own, bucket)
    if bucket.buffer().device.type == "cpu":
        result.wait()
    return result


ROUNDING = {"bf16": bf16, "fp16": fp16}
ITEM_BYTES = 2  # of what these send
