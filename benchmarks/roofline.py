"""Where the time of a convolutional step goes on the CPU, and how near the peak operators are.

python benchmarks/roofline.py
python benchmarks/roofline.py --models resnet18 --batch 32 --contiguous

Each operator of a training step is timed on one thread, with its operations and the bytes of its
tensors. The peaks are those of this machine: a large matrix product, and a copy of a large tensor.
An operator cannot be faster than the slower of the two allows, which is the column `bound`.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddp_runner.host.memory import keep_freed_memory
from ddp_runner.models.convnet import ConvNet
from ddp_runner.models.torchvision_models import classifier

WARMUP, STEPS = 3, 10
SIZE = 2048  # rows and columns of the matrix product
COPIED = 2**26  # elements of the copy
SHOWN = 12  # operators


class Timed(TorchDispatchMode):
    """Adds up the seconds, the operations and the bytes of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = defaultdict[str, float](float)
        self.flops = defaultdict[str, float](float)
        self.bytes = defaultdict[str, float](float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        self.seconds[name] += time.perf_counter() - began
        if count := flop_registry.get(func.overloadpacket):
            self.flops[name] += count(*args, **(kwargs or {}), out_val=result)
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return result


def main() -> None:
    """Measure the peaks and each model; print a table of each model's operators."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--contiguous", action="store_true", help="instead of channels_last")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    factor, source = torch.randn(SIZE, SIZE), torch.randn(COPIED)
    flops_per_s = 2 * SIZE**3 / _seconds(lambda: factor @ factor)
    bytes_per_s = 2 * source.nbytes / _seconds(source.clone)
    print(f"peaks: {flops_per_s / 1e9:.0f} GFLOP/s, {bytes_per_s / 1e9:.1f} GB/s")
    for name in args.models:
        torch.manual_seed(0)
        model, shape = MODELS[name]
        memory_format = torch.contiguous_format if args.contiguous else torch.channels_last
        counted, step_s = measure(model().to(memory_format=memory_format), (args.batch, *shape))
        bounds = {
            op: max(counted.flops[op] / flops_per_s, counted.bytes[op] / bytes_per_s)
            for op in counted.seconds
        }
        print(
            f"\n{name}, {args.batch} samples: {1000 * step_s:.1f} ms a step, of which the peaks "
            f"explain {1000 * sum(bounds.values()):.1f} ms"
        )
        print(f"{'operator':36}{'ms':>8}{'share':>8}{'GFLOP/s':>9}{'GB/s':>7}{'bound':>8}")
        by_time = sorted(counted.seconds, key=lambda op: -counted.seconds[op])
        for op in by_time[:SHOWN]:
            seconds = counted.seconds[op]
            print(
                f"{op:36}{1000 * seconds:8.2f}{seconds / step_s:8.0%}"
                f"{counted.flops[op] / seconds / 1e9:9.0f}{counted.bytes[op] / seconds / 1e9:7.1f}"
                f"{bounds[op] / seconds:8.0%}"
            )


def measure(model: nn.Module, shape: tuple[int, ...]) -> tuple[Timed, float]:
    """Return the operators of a mean training step, and the seconds of a step without counting."""
    images, labels = torch.rand(shape), torch.randint(0, 10, shape[:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    step_s = _seconds(step)
    with Timed() as timed:
        for _ in range(STEPS):
            step()
    for counts in (timed.seconds, timed.flops, timed.bytes):
        for name in counts:
            counts[name] /= STEPS
    return timed, step_s


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest quarter of STEPS calls."""
    times = list[float]()
    for _ in range(STEPS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[STEPS // 4]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnet": (ConvNet, (1, 28, 28)),
    "resnet18": (
        partial(
            classifier, architecture="resnet18", num_classes=10, in_channels=3, small_images=False
        ),
        (3, 32, 32),
    ),
}

if __name__ == "__main__":
    main()
