"""Counts the floating-point operations of a forward and backward, and of a device's best second."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

BUDGET_S = 0.05  # to measure the matrix products of one device
SMALLEST, LARGEST = 256, 4096  # rows of the matrices; the largest two take 0.13 GB in fp32
# How operators are called that multiply much, beside those for which torch has a formula.
PRODUCTS = {"addmm", "addmv", "baddbmm", "bmm", "linear", "mm", "mv", "trilinear"}
FAMILIES = ("attention", "cdist", "conv", "fft", "linalg", "matmul", "rnn", "transformer")


def count_flops(loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> int | None:
    """Return the operations of a loss and its gradients; None if torch cannot count them all.

    Those of matrix products, convolutions and attention count, a multiplication and an addition as
    two; the others are few. ``.grad`` stays as it is, and so do the hooks of DDP.

    Source: torch.utils.flop_counter
    """
    # A tenth of a second, of which a short run needs nothing.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.enable_grad(), counter, _Uncounted() as uncounted:
        torch.autograd.grad(loss(), parameters, allow_unused=True)
    return None if uncounted.found else counter.get_total_flops() or None


class _Uncounted(TorchDispatchMode):
    """Notes whether there are operators that multiply much and have no formula."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # mypy knows torch's untyped functions by their names
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        from torch.utils.flop_counter import flop_registry

        if func.overloadpacket not in flop_registry:
            words = func.overloadpacket.__name__.strip("_").split("_")
            self.found |= (
                func.namespace not in ("aten", "prim", "prims", "profiler")  # a kernel of somebody
                or not PRODUCTS.isdisjoint(words)
                or any(word.startswith(FAMILIES) for word in words)
            )
        return func(*args, **(kwargs or {}))


def matmul_flops_per_s(devices: Sequence[torch.device], dtype: torch.dtype) -> float:
    """Return the operations per second of large matrix products, summed over different devices.

    It is what the device reaches in practice, with this number of threads and beside the other
    ranks on the machine, not what its data sheet says.
    """
    return sum(_one_device(device, dtype) for device in set(devices))


@torch.no_grad()
def _one_device(device: torch.device, dtype: torch.dtype) -> float:
    """Double the matrices until a product takes a tenth of the budget; then take the mean."""
    size, deadline = SMALLEST, time.perf_counter() + BUDGET_S
    while True:
        # Not zeros: a GPU multiplies them faster.
        factor = torch.linspace(0.1, 1.0, size * size, device=device).to(dtype).view(size, size)
        product = factor @ factor  # allocates, and chooses a kernel
        took_s = _timed(factor, product, count=1)
        if took_s > BUDGET_S / 10 or size == LARGEST or time.perf_counter() > deadline:
            count = max(1, int((deadline - time.perf_counter()) / took_s))
            return 2 * size**3 * count / _timed(factor, product, count=count)
        size *= 2


def _timed(factor: Tensor, product: Tensor, *, count: int) -> float:
    """Return the seconds of some products."""
    wait(factor.device)
    began = time.perf_counter()
    for _ in range(count):
        torch.mm(factor, factor, out=product)
    wait(factor.device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
