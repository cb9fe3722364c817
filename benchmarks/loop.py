"""The tutorial's loop and the runner's, side by side: throughput, whole process, and losses.

python benchmarks/loop.py --data-root data

Both train the ConvNet on MNIST for an epoch with 100 samples per rank, plain SGD, fp32, the same
initial weights and the same order of samples, on 1 rank (two threads) and on 2 (one thread each).
They take turns, so that a drifting machine speed affects both alike. Read the ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.seeds import derive

TUTORIAL = Path(__file__).with_name("tutorial.py")
LR, SEED = 1e-4, 0


@dataclass(frozen=True)
class Measured:
    """The measurements of one run of one program."""

    samples_per_s: float  # over all ranks, without the first steps
    wall_s: float  # of the whole command
    losses: list[float]  # at steps 100, 200, …, the mean over the global batch


def main() -> None:
    """Measure, print every ratio and their medians, and whether the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder that holds MNIST/raw")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    data_root = str(Path(args.data_root).resolve())
    print("ranks  run  tutorial samples/s  runner samples/s  ratio  tutorial s  runner s  ratio")
    for num_ranks in args.ranks:
        speedups, wall_ratios, worst = [], [], 0.0
        for repeat in range(1, args.repeats + 1):
            with tempfile.TemporaryDirectory() as folder:
                theirs = run_tutorial(num_ranks, data_root=data_root, folder=Path(folder))
                ours = run_runner(num_ranks, data_root=data_root, folder=Path(folder))
            speedups.append(ours.samples_per_s / theirs.samples_per_s)
            wall_ratios.append(theirs.wall_s / ours.wall_s)
            pairs = list(zip(theirs.losses, ours.losses, strict=True))
            worst = max([worst, *(abs(expected - loss) / expected for expected, loss in pairs)])
            print(
                f"{num_ranks:5}  {repeat:3}  {theirs.samples_per_s:18.0f}  "
                f"{ours.samples_per_s:16.0f}  {speedups[-1]:5.2f}  {theirs.wall_s:10.1f}  "
                f"{ours.wall_s:8.1f}  {wall_ratios[-1]:5.2f}",
                flush=True,
            )
        print(
            f"{num_ranks} rank(s), median (min to max): throughput {spread(speedups)}, "
            f"whole process {spread(wall_ratios)}; "
            f"largest relative difference of a loss {worst:.1e}"
        )


def run_tutorial(num_ranks: int, *, data_root: str, folder: Path) -> Measured:
    """Run the plain script under torchrun; all ranks together have a thread per core."""
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    results_path = folder / "tutorial.json"
    wall_s = timed(
        "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", str(TUTORIAL),
        "--data-root", data_root, "--epochs", "1", "--lr", str(LR), "--seed", str(SEED),
        "--order-seed", str(derive(SEED, "order", 0)),  # as in the runner's first epoch
        "--num-threads", str(threads), "--json", str(results_path), cwd=folder,
    )  # fmt: skip
    results = json.loads(results_path.read_text())
    return Measured(results["samples_per_s"][0], wall_s, results["losses"])


def run_runner(num_ranks: int, *, data_root: str, folder: Path) -> Measured:
    """Run the same training with the runner, which sets the threads itself."""
    wall_s = timed(
        "ddp_runner", "experiment=mnist_ddp", f"data_root={data_root}", f"world_size={num_ranks}",
        "train.epochs=1", f"optimizer.lr={LR}", f"seed={SEED}", "hydra.run.dir=run",
        "train.log_every_steps=50", cwd=folder,
    )  # fmt: skip
    text = (folder / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "train/loss" in line]
    # Without the first 50 steps, like the tutorial's.
    steady = [line["perf/step_time_ms"] for line in lines[1:]]
    return Measured(
        samples_per_s=100 * num_ranks * 1000 / statistics.mean(steady),
        wall_s=wall_s,
        losses=[line["train/loss"] for line in lines if line["step"] % 100 == 0],
    )


def timed(module: str, *args: str, cwd: Path, environ: Mapping[str, str] | None = None) -> float:
    """Run a module to its end and return the seconds that the whole process took.

    `environ` are variables to add.
    """
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=cwd,
        env=os.environ | (environ or {}),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def spread(values: list[float]) -> str:
    """Return median, minimum and maximum as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
