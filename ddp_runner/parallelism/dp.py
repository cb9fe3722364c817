"""DataParallel: a process scatters each batch over the visible GPUs and gathers the outputs.

It is here for comparison; PyTorch recommends DDP even on one machine
(https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import Role, rank_devices, same_role


@dataclass(frozen=True)
class DataParallelMode:
    """``torch.nn.DataParallel``; with fewer than two GPUs it runs on one device."""

    name: str

    def role(self, env: DistEnv) -> Role:
        """Return the same role for every rank."""
        return same_role(env)

    def devices(self, env: DistEnv, *, kind: str) -> tuple[torch.device, ...]:
        """Return the first GPU, which holds the model and gathers the outputs, or the CPU."""
        return rank_devices(env, kind=kind)

    def num_devices(self, env: DistEnv, *, kind: str) -> int:
        """Return the number of GPUs that share each batch, or 1 on the CPU."""
        return 1 if kind == "cpu" else torch.cuda.device_count()

    def place(
        self, build: Callable[..., nn.Module], devices: tuple[torch.device, ...]
    ) -> nn.Module:
        """Build the model on the first device."""
        return build().to(devices[0])

    def wrap(self, module: nn.Module, devices: tuple[torch.device, ...]) -> nn.Module:
        """Return the model with a replica on every visible GPU, made anew in each forward."""
        if devices[0].type == "cpu" or torch.cuda.device_count() < 2:
            return module
        return Replicas(module, device_ids=list(range(torch.cuda.device_count())))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: backward itself sums the replicas' gradients."""
        return nullcontext()


class Replicas(nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` with replicas that compute in the caller's precision.

    Autocast's dtype belongs to a thread. DataParallel enables autocast in each replica's thread but
    keeps CUDA's default dtype there, so bf16 would silently become fp16.
    """

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica in its own thread, under autocast to this thread's dtype."""
        dtype = torch.get_autocast_dtype("cuda")
        wrapped = [_Autocast(replica, dtype) for replica in replicas]
        return super().parallel_apply(wrapped, inputs, kwargs)


class _Autocast(nn.Module):
    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=self.dtype, enabled=enabled):
            return self.module(*inputs, **kwargs)
