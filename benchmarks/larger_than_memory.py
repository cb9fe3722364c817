"""A folder of pictures four times as large as the memory: the runner beside a plain script.

python benchmarks/larger_than_memory.py

Both train a tiny network for an epoch with the same dataset, workers, batches, weights and order
of samples. The plain script is DataLoader, DistributedSampler and DDP under torchrun. Memory is
limited by a cgroup, which counts the page cache, if this process may make one (as root); else by
ulimit -d, which does not. The page cache is emptied before each run. They take turns: read the
ratios.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder

from ddp_runner.data.pictures import fitted, upright
from ddp_runner.host.hardware import CGROUPS, own_cgroups
from ddp_runner.seeds import derive

SIZE = 256  # pixels on each side: a picture has 192 KiB
SEED, LR, NUM_CLASSES = 0, 0.01, 2
LOG_EVERY_STEPS = 20  # the first of these intervals is left out
NUM_EVAL = 2  # pictures
LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # of cgroups of version 2 and 1
PEAK_FILES = ("memory.peak", "memory.max_usage_in_bytes")
MODEL = """# @package _global_
defaults: [{override /dataset: image_folder}]
model:
  {name: thumbnail, _target_: larger_than_memory.Thumbnail, num_stages: 1,
   loss: ddp_runner.train.losses.cross_entropy}
"""


class Thumbnail(nn.Sequential):
    """Classify images (batch, 3, height, width) by their means over a grid of 8x8."""

    def __init__(self) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(3 * 64, NUM_CLASSES))


@dataclass(frozen=True)
class Measured:
    """The measurements of one run of one program."""

    samples_per_s: float  # over all ranks, without the first steps
    wall_s: float  # of the whole command
    peak_gib: float | None  # of the worker group, page cache included; None: unknown
    losses: list[float]  # at each LOG_EVERY_STEPS, the mean over the global batch


def main() -> None:
    """Measure, print every ratio and their medians, and whether the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the pictures are written for a while")
    parser.add_argument("--gib", type=float, default=8.0, help="of all pictures")
    parser.add_argument("--limit-gib", type=float, default=2.0, help="of memory")
    # Of two ranks the processes alone take about 2 GiB: torchrun's script is killed now and then.
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="of each rank")
    parser.add_argument("--batch", type=int, default=32, help="pictures of each rank and step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)  # the script under torchrun
    args = parser.parse_args()
    if args.plain is not None:
        plain(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        num_pictures = write_pictures(folder / "pictures", round(args.gib * 2**30))
        limit, kind = limit_of(round(args.limit_gib * 2**30))
        print(
            f"{num_pictures:,} pictures, {args.gib:g} GiB; memory limited to {args.limit_gib:g} "
            f"GiB by {kind}; {args.ranks} rank(s) with {args.workers} worker(s) each"
        )
        print("run  plain samples/s  runner samples/s  ratio  plain s  runner s  ratio  peak GiB")
        speedups, wall_ratios, worst = [], [], 0.0
        for repeat in range(1, args.repeats + 1):
            if repeat % 2:
                theirs = run_plain(args, folder, limit)
                ours = run_runner(args, folder, limit)
            else:
                ours = run_runner(args, folder, limit)
                theirs = run_plain(args, folder, limit)
            speedups.append(ours.samples_per_s / theirs.samples_per_s)
            wall_ratios.append(theirs.wall_s / ours.wall_s)
            pairs = list(zip(theirs.losses, ours.losses, strict=True))
            worst = max([worst, *(abs(expected - loss) / expected for expected, loss in pairs)])
            peaks = ", ".join(
                "?" if one.peak_gib is None else f"{one.peak_gib:.2f}" for one in (theirs, ours)
            )
            print(
                f"{repeat:3}  {theirs.samples_per_s:15.0f}  {ours.samples_per_s:16.0f}  "
                f"{speedups[-1]:5.2f}  {theirs.wall_s:7.1f}  {ours.wall_s:8.1f}  "
                f"{wall_ratios[-1]:5.2f}  {peaks}",
                flush=True,
            )
        print(
            f"median (min to max): throughput {spread(speedups)}, whole process "
            f"{spread(wall_ratios)}; largest relative difference of a loss {worst:.1e}"
        )


def write_pictures(root: Path, num_bytes: int) -> int:
    """Write pictures of noise, half of them brighter, in two classes; return their number."""
    count = num_bytes // (3 * SIZE * SIZE)
    if shutil.disk_usage(root.parent).free < 1.2 * num_bytes:
        raise SystemExit(f"{root.parent} lacks the space for {num_bytes / 2**30:.1f} GiB")
    noise = torch.randint(100, (3 * SIZE * SIZE + count,), dtype=torch.uint8)
    for split, total in (("val", NUM_EVAL), ("train", count)):
        for number in range(total):
            label = number % NUM_CLASSES
            path = root / split / str(label) / f"{number:06d}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = noise[number : number + 3 * SIZE * SIZE] + 20 * label
            path.write_bytes(f"P6 {SIZE} {SIZE} 255\n".encode() + pixels.numpy().tobytes())
    return count


def forget_pages(root: Path) -> None:
    """Drop the pictures from the page cache, where no limit would count them."""
    os.sync()
    for path in root.rglob("*.ppm"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Group:
    """What limits a command's memory."""

    enter: Callable[[], object]  # in the command's process, before it starts
    folder: Path | None = None  # of the cgroup


Limit = Callable[[], AbstractContextManager[Group]]


def limit_of(num_bytes: int) -> tuple[Limit, str]:
    """Return a context that limits a command's memory, and how it does so."""
    for parent in own_cgroups("memory"):
        group = parent / "larger_than_memory"
        try:
            with cgroup(group, num_bytes):
                pass
        except OSError:
            continue
        return partial(cgroup, group, num_bytes), f"a cgroup below {parent.relative_to(CGROUPS)}"
    limits = (num_bytes, num_bytes)
    ulimit = Group(partial(resource.setrlimit, resource.RLIMIT_DATA, limits))
    return partial(nullcontext, ulimit), "ulimit -d, in each process"


@contextmanager
def cgroup(group: Path, num_bytes: int) -> Iterator[Group]:
    """Limit by a new cgroup, which counts the page cache, too."""
    group.mkdir()
    try:
        (file,) = (group / name for name in LIMIT_FILES if (group / name).exists())
        file.write_text(str(num_bytes))
        procs = group / "cgroup.procs"
        yield Group(lambda: procs.write_text(str(os.getpid())), group)
    except ValueError as error:
        raise OSError(f"{group} has no memory controller") from error
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # its last process is ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def run_plain(args: argparse.Namespace, folder: Path, limit: Limit) -> Measured:
    """Run the plain script under torchrun."""
    results = folder / "plain.json"
    script = str(Path(__file__).resolve())
    words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}", script]
    words += ["--plain", str(results), "--folder", str(folder), "--batch", str(args.batch)]
    wall_s, peak = timed([*words, "--workers", str(args.workers)], folder, limit)
    found = json.loads(results.read_text())
    return Measured(found["samples_per_s"], wall_s, peak, found["losses"])


def run_runner(args: argparse.Namespace, folder: Path, limit: Limit) -> Measured:
    """Run the same training with the runner, which finds the folder too large to prepare."""
    config, run = folder / "conf" / "model" / "thumbnail.yaml", folder / "run"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(MODEL)
    shutil.rmtree(run, ignore_errors=True)
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    words = [
        "ddp_runner", "--config-dir", str(config.parents[1]), "model=thumbnail",
        "allowed_targets=[larger_than_memory]", f"data_root={folder}", "dataset.folder=pictures",
        f"dataset.height={SIZE}", f"dataset.width={SIZE}", f"dataset.num_classes={NUM_CLASSES}",
        f"dataset.num_workers={args.workers}", "dataset.prepare=false",
        "dataset.mean=0.0", "dataset.std=1.0",
        f"world_size={args.ranks}", f"batch.per_rank={args.batch}", f"seed={SEED}",
        "optimizer=sgd", f"optimizer.lr={LR}", "scheduler=constant", "train.epochs=1",
        f"train.log_every_steps={LOG_EVERY_STEPS}", f"train.num_threads={threads}",
        "train.eval_every_epochs=0", f"hydra.run.dir={run}",
    ]  # fmt: skip
    wall_s, peak = timed(words, folder, limit)
    text = (run / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "train/loss" in line]
    whole = [line for line in lines if line["step"] % LOG_EVERY_STEPS == 0]
    steady = [line["perf/step_time_ms"] for line in whole[1:]]
    rate = args.batch * args.ranks * 1000 / statistics.mean(steady)
    return Measured(rate, wall_s, peak, [line["train/loss"] for line in whole])


def timed(words: list[str], folder: Path, limit: Limit) -> tuple[float, float | None]:
    """Run a module to its end with a cold page cache; return its seconds and its peak in GiB."""
    forget_pages(folder / "pictures")
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        )
    }
    with limit() as group:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", *words],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            preexec_fn=group.enter,
            env=environ,
        )
        wall_s = time.perf_counter() - start
        peaks = [group.folder / name for name in PEAK_FILES] if group.folder else []
        found = [int(path.read_text()) / 2**30 for path in peaks if path.exists()]
    return wall_s, found[0] if found else None


def plain(args: argparse.Namespace) -> None:
    """Train an epoch as a plain script does; rank 0 writes the results."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    root = args.folder / "pictures"
    dataset = ImageFolder(
        root / "train",
        partial(fitted, height=SIZE, width=SIZE),
        loader=partial(upright, channels=3),
    )
    # The order of the runner's first epoch.
    sampler = DistributedSampler(dataset, seed=derive(SEED, "order", 0))
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Thumbnail())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, start, counted, steady_s = list[float](), 0.0, 0, 0.0
    for step, (images, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(images.float().div_(255)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY_STEPS == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / world_size)
            now = time.perf_counter()
            if step > LOG_EVERY_STEPS:
                counted, steady_s = step - LOG_EVERY_STEPS, now - start
            else:
                start = now
    if rank == 0:
        rate = counted * args.batch * world_size / steady_s
        args.plain.write_text(json.dumps({"samples_per_s": rate, "losses": losses}))
    dist.destroy_process_group()


def spread(values: list[float]) -> str:
    """Return median, minimum and maximum as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
