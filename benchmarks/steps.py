"""What the runner itself costs in a step: a bare DDP loop and the runner, in turns, on short steps.

python benchmarks/steps.py
python benchmarks/steps.py --ranks 8 --steps 1000

Both train the toy model of the DDP tutorial on the same tensors, 20 samples a rank, with plain SGD
and one thread a rank; a step takes about a millisecond on two cores. The bare loop has nothing but
its torch calls. Both are timed by a clock of their own without their first steps, and the runner's
lines of metrics count. The programs take turns, and the first changes. Read the ratios.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from loop import spread, timed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy_tutorial import ToyModel

SAMPLES, BATCH_SIZE = 10_000, 20  # of the dataset; samples a step and rank
WARMUP = 200  # steps that are not timed: a multiple of LOG_EVERY
LOG_EVERY = 100  # steps from one line of the runner's metrics to the next


def main() -> None:
    """Measure; print each turn's milliseconds a step, and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=3000, help="timed steps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare is not None:
        bare(args.steps, args.bare)
        return
    print("ranks  run        bare      runner  (ms a step)   bare / runner")
    for num_ranks in args.ranks:
        ratios = list[float]()
        for turn in range(args.repeats):
            programs = [run_bare, run_runner][:: 1 if turn % 2 else -1]
            found = {program: program(num_ranks, args.steps) for program in programs}
            ratios.append(found[run_bare] / found[run_runner])
            print(
                f"{num_ranks:5}  {turn + 1:3}  {found[run_bare]:10.3f}  {found[run_runner]:10.3f}"
                f"{'':16}{ratios[-1]:.2f}",
                flush=True,
            )
        print(f"{num_ranks} rank(s): the runner has {spread(ratios)} of the bare loop's speed")


def run_bare(num_ranks: int, num_steps: int) -> float:
    """Return the milliseconds of a step of the bare loop under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        timed(
            "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", __file__,
            f"--bare={result}", f"--steps={num_steps}", cwd=Path(folder),
            environ={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return float(json.loads(result.read_text()))


def run_runner(num_ranks: int, num_steps: int) -> float:
    """Return the milliseconds of a step of the runner, from its own lines."""
    with tempfile.TemporaryDirectory() as folder:
        timed(
            "ddp_runner", "model=toy", f"dataset.num_samples={SAMPLES}", f"world_size={num_ranks}",
            f"batch.per_rank={BATCH_SIZE}", f"train.max_steps={WARMUP + num_steps}",
            f"train.log_every_steps={LOG_EVERY}", "train.num_threads=1",
            "train.eval_every_epochs=0", "checkpoint.every_epochs=null", "hydra.run.dir=run",
            cwd=Path(folder),
        )  # fmt: skip
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "train/loss" in line]
    first, last = lines[WARMUP // LOG_EVERY - 1], lines[-1]
    return float(1000 * (last["time_s"] - first["time_s"]) / (last["step"] - first["step"]))


def bare(num_steps: int, result: Path) -> None:
    """Train as one rank of torchrun; rank 0 writes the milliseconds of a step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, loss_fn = DistributedDataParallel(ToyModel()), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = batches()
    for step in range(WARMUP + num_steps):
        if step == WARMUP:
            began = time.perf_counter()
        inputs, targets = next(steps)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(1000 * (time.perf_counter() - began) / num_steps))
    dist.destroy_process_group()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches of random numbers in memory, in a new order in each epoch."""
    inputs, targets = torch.randn(SAMPLES, 10), torch.randn(SAMPLES, 5)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    while True:
        for rows in torch.randperm(SAMPLES)[rank::world_size].split(BATCH_SIZE):
            yield inputs.index_select(0, rows), targets.index_select(0, rows)


if __name__ == "__main__":
    sys.exit(main())
