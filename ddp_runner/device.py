"""A rank's accelerators, of any kind that torch supports: see docs/accelerators.md."""

import resource
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ddp_runner.errors import UserError
from ddp_runner.host.hardware import CUDA, GET_TORCH

MPS = "mps"  # Apple's: no streams, pinned memory, peak memory or float64


def open_devices(devices: Sequence[torch.device], *, precision: str) -> None:
    """Initialise this rank's accelerators and make the first one current; do nothing on a CPU.

    fp32 products are computed in fp32, in cuDNN's convolutions too, where torch's default is TF32:
    its peak is several times higher, so ``perf/mfu`` would compare different things.

    Raises:
        UserError: torch cannot use the accelerators, or one of them lacks the precision.
    """
    first = devices[0]
    if first.type == "cpu":
        return
    module = torch.get_device_module(first)
    try:
        if has_streams(first):
            torch.accelerator.set_device_index(first)
        torch.empty(1, device=first)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"torch {torch.__version__} cannot use {first} ({reason})",
            f"update the driver, install a torch that was built for it ({GET_TORCH}), or write "
            "backend=gloo backend.device=cpu",
        ) from error
    backends: Any = torch.backends  # its attribute is not in its type
    backends.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    for device in devices if precision == "tf32" else ():
        if module.get_device_capability(device) < (8, 0):
            raise UserError(
                f"train.precision=tf32 does not exist on {device} ({device_name(device)})",
                "write train.precision=fp32",
            )
    for device in devices if precision == "bf16" and first.type == CUDA else ():
        with module.device(device):
            if not module.is_bf16_supported(including_emulation=False):
                raise UserError(
                    f"train.precision=bf16 would be emulated on {device} ({device_name(device)}), "
                    "slower than fp32",
                    "write train.precision=fp16 or fp32",
                )


def device_name(device: torch.device) -> str:
    """Return the maker's name of a device; its kind if torch does not know the name."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def device_uuid(device: torch.device) -> str | None:
    """Return the UUID of a device; None if torch does not know it."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.uuid) if hasattr(properties, "uuid") else None


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams, and so can copy while it computes."""
    return device.type not in ("cpu", "meta", MPS)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until all work of the devices is done; a CPU needs no wait."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


_copy_stream = cache(torch.Stream)  # one for each device


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU without waiting, while the device computes.

    It is copied through pinned memory, which torch reuses once the copy is done. A tensor that is
    pinned already must not change until then.
    """
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    if tensor.device == device or not has_streams(device) or not is_dense or not tensor.numel():
        return tensor.to(device)
    stream, current = _copy_stream(device), torch.accelerator.current_stream(device)
    if not tensor.is_pinned():  # pin_memory() keeps gaps, which CUDA cannot copy asynchronously
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    with stream:
        copied = tensor.to(device, non_blocking=True)
    current.wait_stream(stream)
    copied.record_stream(current)
    return copied


def values_of(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of scalars, also from several devices; the host waits once."""
    if not scalars:
        return []
    device = scalars[-1].device
    return torch.cat([scalar.reshape(1).to(device) for scalar in scalars]).tolist()


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of many numbers: float64, or float32 on MPS, which lacks it."""
    return torch.float32 if device.type == MPS else torch.float64


def seed_devices(seed: int) -> None:
    """Seed the generators of all accelerators that this process uses."""
    if (kind := torch.accelerator.current_accelerator()) is not None:
        module = torch.get_device_module(kind)
        if kind.type == MPS or module.is_initialized():
            getattr(module, "manual_seed_all", module.manual_seed)(seed)


def peak_memory_gib() -> float:
    """Return this process's peak memory: torch's allocations on its fullest GPU, else RAM."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not has_streams(kind) or not torch.get_device_module(kind).is_initialized():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, else KiB
        return peak / (2**30 if sys.platform == "darwin" else 2**20)
    devices = range(torch.accelerator.device_count())
    return max(map(torch.accelerator.max_memory_allocated, devices)) / 2**30
