"""The backend "simccl" of torch.distributed."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from simgpu.native import library


def register() -> None:
    """Make simccl known, as the backend of simgpu tensors."""
    if dist.is_available() and not hasattr(dist.Backend, "SIMCCL"):
        dist.Backend.register_backend("simccl", _group, devices=["simgpu"])


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
    return library.make_simccl(gloo)
