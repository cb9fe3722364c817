"""DataParallel: a process scatters each batch over the visible GPUs and gathers the outputs.

It is for comparison; PyTorch recommends DDP even on one machine
(https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_runner.parallelism.single import Single


@dataclass(frozen=True)
class DataParallelMode(Single):
    """``torch.nn.DataParallel``; with fewer than two GPUs it runs on one device.

    Backward itself sums the replicas' gradients.
    """

    def wrap(self, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
        """Return the model; each forward makes a replica on every visible GPU."""
        count = 1 if devices[0].type == "cpu" else torch.accelerator.device_count()
        return module if count < 2 else Replicas(module, device_ids=list(range(count)))


class Replicas(nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` with replicas that compute in the caller's precision.

    Autocast's dtype belongs to a thread. DataParallel enables autocast in each replica's thread but
    keeps CUDA's default dtype there, so bf16 would silently become fp16.
    """

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica in its own thread, under autocast to this thread's dtype."""
        kind = self.src_device_obj.type  # "cuda": torch's scatter and gather support nothing else
        dtype = torch.get_autocast_dtype(kind)

        def run(replica: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
            enabled = torch.is_autocast_enabled(kind)
            with torch.autocast(kind, dtype=dtype, enabled=enabled):
                return replica(*inputs, **kwargs)

        calls: Any = [partial(run, replica) for replica in replicas]  # torch only calls them
        return super().parallel_apply(calls, inputs, kwargs)
