"""Counts a step's floating-point operations, and measures how many a device can do per second."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from ddp_runner.errors import typed

BUDGET_S = 0.05  # to measure the matrix products of one device
SMALLEST, LARGEST = 256, 4096  # rows of the matrices; the largest two take 0.13 GB in fp32
# Words in the names of expensive operators, beside those for which torch has a formula.
PRODUCTS = {"addmm", "addmv", "baddbmm", "bmm", "linear", "mm", "mv", "trilinear"}
SOLVERS = {"cholesky", "geqrf", "ormqr", "triangular"}
FAMILIES = ("attention", "cdist", "conv", "fft", "linalg", "matmul", "rnn", "transformer")
CHEAP = {"linalg_vector_norm"}  # named like a family, but only a sum
PLAIN = (Tensor, nn.Parameter)
# Methods by which torch's DTensor, and a tensor that other ranks still send, are known: to import
# their classes takes half a second.
SPLIT = ("full_tensor", "trigger_wait")
# Of operators that multiply little: torch's own, and the exchange of gradients and shards. Any
# other namespace is a third-party kernel.
NAMESPACES = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp"}


class FlopCounter:
    """Counts the operations of a forward and backward, once.

    Results stay the same bit for bit, but for the gradient of ``torch.prod``, in which torch takes
    another formula meanwhile.

    Those of matrix products, convolutions and attention count, a multiplication and an addition as
    two; the others are few. What torch's activation checkpointing computes twice counts once.

    Args:
        unknown: why nothing can be counted; empty if it can.

    Source: torch.utils.flop_counter
    """

    def __init__(self, *, unknown: str = "") -> None:
        self.num_samples, self.is_over = 0, bool(unknown)
        self._mode = _Counting(unknown)

    @contextmanager
    def counting(self, *, num_samples: int) -> Iterator[None]:
        """Count in the block, in which this rank computes the loss of so many samples."""
        self.num_samples, self.is_over = num_samples, True
        with self._mode:
            yield

    @property
    def flops(self) -> int | None:
        """The operations of this rank; None if they cannot all be counted."""
        return None if self.why_unknown else self._mode.flops

    @property
    def why_unknown(self) -> str:
        """Why there is no count; empty if there is one."""
        return self._mode.unknown or ("" if self._mode.flops else "the step multiplies nothing")


class _Counting(TorchDispatchMode):
    """Sees each operator that runs meanwhile."""

    supports_higher_order_operators = True  # without it, flex_attention raises an error

    def __init__(self, unknown: str) -> None:
        TorchDispatchMode.__init__(self)  # mypy knows torch's untyped functions by their names
        self.flops, self.unknown, self._adding = 0, unknown, threading.Lock()
        self._formulas = _formulas() if not unknown else {}
        self._tracker = ModuleTracker()  # it is never entered: only its is_bw is read
        self._is_plain_backward = False  # it makes no graph of the gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count it; of a tensor that is split, those of this rank's part."""
        if any(hasattr(one, name) for one in types for name in SPLIT):
            return NotImplemented  # it then runs operators of its own, with plain tensors
        for one in types:
            if one not in PLAIN:  # such as a nested tensor, which runs other operators
                self.unknown = self.unknown or f"{one.__name__} is no plain tensor"
        result = func(*args, **(kwargs or {}))
        try:
            self._count(func, args, kwargs or {}, result)
        except Exception as error:  # of a formula: no reason to fail in the middle of a step
            self.unknown = f"{func}: {typed(error)}"
        return result

    def _count(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        packet, is_recomputed = getattr(func, "overloadpacket", func), self._is_recomputed()
        formula = self._formulas.get(packet)
        if formula is None:
            if _may_multiply(packet, getattr(func, "namespace", "")):
                self.unknown = self.unknown or f"{packet} has no formula"
        elif any(isinstance(one, Tensor) and one.is_complex() for one in args):
            self.unknown = self.unknown or f"{packet} multiplies complex numbers"
        elif any(isinstance(one, Tensor) and one.layout != torch.strided for one in args):
            self.unknown = self.unknown or f"{packet} multiplies sparse tensors"
        elif not is_recomputed:
            flops = formula(*args, **kwargs, out_val=result)
            with self._adding:  # autograd has a thread for each GPU
                self.flops += flops

    def _is_recomputed(self) -> bool:
        """Return whether activation checkpointing computes an operator of the forward once more.

        It does so within a backward, and for gradients, for which a plain backward computes nothing
        itself. The gradient of a gradient does, from its backward's first operator on.
        """
        if not self._tracker.is_bw:
            self._is_plain_backward = False
        elif not torch.is_grad_enabled():
            self._is_plain_backward = True
        return self._is_plain_backward and torch.is_grad_enabled()


def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Return a function for each operator that multiplies much: (arguments, out_val) -> FLOPs."""
    # A tenth of a second to import, which a short run need not spend.
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    def convolution_backward(
        grad: Tensor, inputs: Tensor, weight: Tensor, *others: Any, out_val: Any
    ) -> int:
        """Count as many for each gradient as for the forward; torch's formula ignores groups."""
        transposed, mask = others[4], others[7]
        before, kernel, after = (list(one.shape) for one in (inputs, weight, grad))
        once: int = conv_flop_count(before, kernel, after, transposed=transposed)
        return once * int(sum(mask[:2]))

    return {**flop_registry, torch.ops.aten.convolution_backward: convolution_backward}


def _may_multiply(packet: Any, namespace: str) -> bool:
    name = packet.__name__
    if namespace not in NAMESPACES:
        return True
    words = name.strip("_").split("_")
    is_product = not (PRODUCTS | SOLVERS).isdisjoint(words)
    return name not in CHEAP and (is_product or any(word.startswith(FAMILIES) for word in words))


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything here.

    While its operators are counted, compiled code runs uncompiled, and rounds differently.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["ok"])


def matmul_flops_per_s(devices: Sequence[torch.device], dtype: torch.dtype) -> float:
    """Return the operations per second of large matrix products, summed over different devices.

    It is what the device reaches in practice, with this number of threads and beside the other
    ranks on the machine, not what its data sheet says.
    """
    return sum(_one_device(device, dtype) for device in set(devices))


@torch.no_grad()
def _one_device(device: torch.device, dtype: torch.dtype) -> float:
    """Double the matrices until a product takes a tenth of the budget; then take the mean."""
    size = SMALLEST
    while True:
        # Not zeros: a GPU multiplies them faster.
        factor = torch.linspace(0.1, 1.0, size * size, device=device).to(dtype).view(size, size)
        product = factor @ factor  # allocates, and chooses a kernel, which may take long
        took_s = _timed(factor, product, count=1)
        if took_s > BUDGET_S / 10 or size == LARGEST:
            count = max(1, int(BUDGET_S / took_s))
            return 2 * size**3 * count / _timed(factor, product, count=count)
        size *= 2


def _timed(factor: Tensor, product: Tensor, *, count: int) -> float:
    """Return the seconds of some products."""
    synchronize(factor.device)
    began = time.perf_counter()
    for _ in range(count):
        torch.mm(factor, factor, out=product)
    synchronize(factor.device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
