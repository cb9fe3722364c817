"""The GPUs of a rank: whether they work, and their memory."""

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ddp_runner.errors import UserError
from ddp_runner.host.hardware import GET_TORCH


def open_devices(devices: Sequence[torch.device], *, precision: str) -> None:
    """Initialise this rank's GPUs and make the first one current; do nothing on a CPU.

    Products of fp32 are computed as such, also in cuDNN's convolutions, where torch's own default
    is TF32: its peak is several times as high, so ``perf/mfu`` would compare unlike things.

    Raises:
        UserError: torch cannot use the GPUs, or one of them lacks the precision.
    """
    if devices[0].type != "cuda":
        return
    try:
        torch.cuda.init()
        torch.cuda.set_device(devices[0])
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"torch {torch.__version__} cannot use {devices[0]} ({reason}); update the driver, "
            f"install a torch that was built for it ({GET_TORCH}), or write backend=gloo "
            "backend.device=cpu"
        ) from error
    products: Any = torch.backends  # its attribute is not in its type
    products.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    for device in devices if precision == "tf32" else ():
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise UserError(
                f"train.precision=tf32 does not exist on {device} "
                f"({torch.cuda.get_device_name(device)}); write train.precision=fp32"
            )
    for device in devices if precision == "bf16" else ():
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise UserError(
                    f"train.precision=bf16 would be emulated on {device} "
                    f"({torch.cuda.get_device_name(device)}), slower than fp32; write "
                    "train.precision=fp16 or fp32"
                )


def peak_memory_gib() -> float:
    """Return this process's peak memory: what torch allocated on its fullest GPU, else RAM."""
    if not torch.cuda.is_initialized():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, else KiB
        return peak / (2**30 if sys.platform == "darwin" else 2**20)
    peaks = [torch.cuda.max_memory_allocated(one) for one in range(torch.cuda.device_count())]
    return max(peaks) / 2**30
