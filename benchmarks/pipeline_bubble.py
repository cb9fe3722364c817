"""How long ranks of a pipeline wait, measured beside the formula (p - 1) / (m v + p - 1).

python benchmarks/pipeline_bubble.py

Two ranks train gpt with m micro-batches of one size. A pipeline without waiting would take m times
the time of one more micro-batch, which is the slope of the step time over m; what a step takes
beyond that is the bubble, with all that a step does once. The speed of cores drifts, so each round
takes a step of every m and has a slope of its own; the shares are medians over the rounds. Give it
two idle cores.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from train_states import build, compose_config

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.train.first_batch import try_run
from ddp_runner.train.loop import build_engine

RANKS, MICRO_SIZE, ROUNDS = 2, 4, 15
COUNTS = (2, 4, 8, 16)
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2}  # and the stages of a rank
KEYS = (
    *("model=gpt", "model.num_layers=8", "model.width=256", "dataset.sequence_length=64"),
    *("parallelism=pp", "train.num_threads=1"),
)


def main() -> None:
    """Measure each schedule, and print a row for each number of micro-batches."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("schedule      m  step, ms  bubble  formula")
    for schedule, stages in SCHEDULES.items():
        of_mode = f"parallelism.schedule={schedule}", f"parallelism.stages_per_rank={stages}"
        configs = []
        for count in COUNTS:
            size = f"train.grad_accum_steps={count}", f"batch.global_size={MICRO_SIZE * count}"
            configs.append(compose_config(*KEYS, *of_mode, *size, world_size=RANKS))
        found = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = configs, f"file://{folder}/store", found
            multiprocessing.spawn(measure, args=arguments, nprocs=RANKS)
        rounds = found.get()
        slopes = [(times[-1] - times[0]) / (COUNTS[-1] - COUNTS[0]) for times in rounds]
        for number, count in enumerate(COUNTS):
            pairs = zip(slopes, rounds, strict=True)
            bubble = statistics.median(1 - count * slope / times[number] for slope, times in pairs)
            formula = (RANKS - 1) / (count * stages + RANKS - 1)
            step_ms = 1000 * statistics.median(times[number] for times in rounds)
            shares = f"{bubble:7.0%} {formula:8.0%}"
            print(f"{schedule:11} {count:3} {step_ms:9.1f} {shares}", flush=True)


def measure(rank: int, configs: list[Config], store: str, found: Any) -> None:
    """Put the seconds of forward and backward under each config into a queue, by round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    env = DistEnv(rank, local_rank=rank, world_size=RANKS, local_world_size=RANKS)
    states = []
    for config in configs:
        state = build(env, config)
        try_run(state)
        state.engine = build_engine(state)
        states.append((state, next(iter(state.batches))))
    rounds = []
    for _ in range(ROUNDS + 1):
        times = []
        for state, batch in states:
            dist.barrier()
            began = time.perf_counter()
            state.engine.backward(state, batch)
            dist.barrier()
            times.append(time.perf_counter() - began)
        rounds.append(times)
    if env.is_rank_zero:
        found.put(rounds[1:])  # the first makes the schedules


if __name__ == "__main__":
    main()
