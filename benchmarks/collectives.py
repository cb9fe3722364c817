"""The bus bandwidth of an all-reduce, timed by the runner and timed by hand.

torchrun --standalone --nproc-per-node=2 benchmarks/collectives.py

Both time the same call on a message of the same size in the same process group, so only the timing
differs. They run in alternating order, so that a drifting machine speed affects both alike. Read
the ratio of the last line.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_runner.collectives.measurement import prepare, summarize, time_calls
from ddp_runner.collectives.operations import Variant
from ddp_runner.config.sections import CollectivesConfig
from ddp_runner.distributed import gather_objects


def main() -> None:
    """Measure, and let rank 0 print both bandwidths of each turn and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64 * 2**20, help="of the message")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="timed calls of a turn")
    args = parser.parse_args()
    local_rank, local_world_size = (
        int(os.environ[f"LOCAL_{key}"]) for key in ("RANK", "WORLD_SIZE")
    )
    has_gpus = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as the runner does on one machine
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")

    timings: dict[str, Callable[[int], float]] = {
        "runner": Runner(args.bytes, device=device),
        "by hand": ByHand(args.bytes, device=device),
    }
    ratios: list[float] = []
    for turn in range(-1, args.turns):  # the first is a warm-up
        order = list(timings) if turn % 2 else list(reversed(timings))
        busbw = {name: timings[name](args.steps) for name in order}
        if turn < 0:
            continue
        ratios.append(busbw["runner"] / busbw["by hand"])
        if dist.get_rank() == 0:
            speeds = "  ".join(f"{name} {busbw[name]:.4f} GB/s" for name in timings)
            print(f"turn {turn + 1:2}  {speeds}  ratio {ratios[-1]:.3f}", flush=True)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, all_reduce of {args.bytes} bytes on {device.type}: "
            f"busbw, runner over by hand: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    dist.destroy_process_group()


class Runner:
    """The runner's timing: verified data, ranks in step, the median of the slowest rank."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        self._variant = Variant("all_reduce", "float32", "sum")
        self._call = prepare(self._variant, num_bytes=num_bytes, device=device)
        self._call.verify()

    def __call__(self, steps: int) -> float:
        """Return the bus bandwidth in GB/s. Collective: every rank must call."""
        seconds = time_calls(self._call, CollectivesConfig(warmup_steps=0, steps=steps))
        assert seconds is not None
        measured = summarize(self._variant, self._call.num_bytes, gather_objects(seconds))
        assert measured.busbw_gb_per_s is not None
        return measured.busbw_gb_per_s


class ByHand:
    """By hand: ones, a barrier, a clock around the call, the median of the slowest rank."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        self._tensor = torch.ones(num_bytes // 4, device=device)

    def __call__(self, steps: int) -> float:
        """Return the bus bandwidth in GB/s. Collective: every rank must call."""
        seconds = torch.zeros(steps, dtype=torch.float64)
        for step in range(steps):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(self._tensor)
            if self._tensor.is_cuda:
                torch.cuda.synchronize()
            seconds[step] = time.perf_counter() - start
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        n, num_bytes = dist.get_world_size(), self._tensor.nbytes
        median_s = float(seconds.quantile(0.5))
        return num_bytes / median_s / 1e9 * 2 * (n - 1) / n


if __name__ == "__main__":
    main()
