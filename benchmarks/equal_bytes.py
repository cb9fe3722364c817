"""What do equal bytes cost? Steps with batch.virtual_ranks beside plain steps, in turns.

python benchmarks/equal_bytes.py --ranks 2 --turns 5

Both have the same micro-batches and the same global batch, in the same processes. With as many
virtual ranks as ranks each rank computes one part; with four times as many it computes four, beside
train.grad_accum_steps=4. The table shows medians of the turns, and the ratio of the two.
"""

import argparse
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from train_states import build, compose_config

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.memory import keep_freed_memory
from ddp_runner.train.buffers import find_changing
from ddp_runner.train.loop import build_engine, take_step
from ddp_runner.train.state import TrainState

MODELS = {
    "convnet": ("model=convnet", "dataset=fake_images", "batch.per_rank=32"),
    "resnet18": (
        *("model=resnet18", "dataset=fake_images", "dataset.channels=3", "dataset.height=32"),
        *("dataset.width=32", "batch.per_rank=8"),
    ),
    "gpt": (
        *("model=gpt", "batch.global_size=null", "batch.per_rank=4"),
        "dataset.sequence_length=128",
    ),
}
MODES = ("ddp", "fsdp")
STEPS = 6  # of a turn; the first is not timed


def main() -> None:
    """Measure each case, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    print("| model | mode | parts a rank | plain ms | equal bytes ms | ratio |", flush=True)
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.ranks, args.turns, f"file://{folder}/store"), nprocs=args.ranks)


def work(rank: int, ranks: int, turns: int, init_method: str) -> None:
    """Measure all cases on a rank; rank 0 prints them."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as each rank of a run does
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)
    env = DistEnv(rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks)
    for (model, keys), mode, parts in product(MODELS.items(), MODES, (1, 4)):
        common = (*keys, f"parallelism={mode}", "train.num_threads=1")
        plain, virtual = (
            compose_config(*common, key, world_size=ranks)
            for key in (f"train.grad_accum_steps={parts}", f"batch.virtual_ranks={parts * ranks}")
        )
        first, second = (1000 * median(times) for times in measured(env, plain, virtual, turns))
        if rank == 0:
            row = (model, mode, parts, f"{first:.1f}", f"{second:.1f}", f"{second / first:.2f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    dist.destroy_process_group()


def measured(env: DistEnv, plain: Config, virtual: Config, turns: int) -> list[list[float]]:
    """Return the seconds of a step in each turn, plain and with virtual ranks."""
    states = [_ready(env, config) for config in (plain, virtual)]
    assert states[0].batches.global_size == states[1].batches.global_size
    times: list[list[float]] = [[], []]
    for _ in range(turns):
        for state, values in zip(states, times, strict=True):
            took = []
            for batch in islice(iter(state.batches), STEPS):
                started = time.perf_counter()
                take_step(state, batch)
                dist.barrier()
                took.append(time.perf_counter() - started)
            values.append(median(took[1:]))
    return times


def _ready(env: DistEnv, config: Config) -> TrainState:
    state = build(env, config)
    find_changing(state)
    state.engine = build_engine(state)
    state.model.train()
    return state


if __name__ == "__main__":
    main()
