"""What the figures of docs/where_time_goes.md cost and how exact they are, side by side.

python benchmarks/skew.py delays     # 50 ms a step are injected: are they found, on the right rank?
python benchmarks/skew.py cost       # the same steps with and without measuring, in turns

The cost is that of all marks of a step and of a log line every ten steps. Blocks of steps take
turns, since other work on the machine disturbs both alike; read the median of the ratios. The CPU
time is that of rank 0's main thread, which runs forward, backward and optimizer; it hardly depends
on other work.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import torch
from ranks import run_ranks
from train_states import Trace, build, compose_config, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.metric_names import StepPart
from ddp_runner.train.loop import take_step
from ddp_runner.train.state import TrainState
from ddp_runner.train.step_metrics import reduce_step_metrics
from ddp_runner.train.step_timer import Skew, StepTimer

DELAY_S = 0.05
BLOCK = 10  # steps, and the line of metrics after them
IMAGES = ("dataset=fake_images", "train.eval_every_epochs=0", "train.epochs=1000")
MODELS = {
    "toy": ("model=toy", "batch.per_rank=20", "dataset.num_samples=4000"),
    "convnet": ("model=convnet", *IMAGES, "batch.per_rank=50", "dataset.num_samples=1000"),
    "resnet18": ("model=resnet18", *IMAGES, "batch.per_rank=8", "dataset.num_samples=160"),
}


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["delays", "cost"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--pairs", type=int, default=40, help="of blocks of ten steps")
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "train_states"])
    if args.what == "delays":
        measure_delays(args.ranks)
    else:
        measure_calls()
        for model in args.models:
            measure_cost(model, args.pairs)


def nap(*_: object) -> None:
    """Sleep, as a hook."""
    time.sleep(DELAY_S)


def in_forward(state: TrainState) -> None:
    """Delay each forward."""
    state.module.register_forward_pre_hook(nap)


def in_backward(state: TrainState) -> None:
    """Delay each backward in its middle."""
    state.module.get_submodule("relu").register_full_backward_hook(nap)


def in_data(state: TrainState) -> None:
    """Delay the loading of each batch."""
    split: Any = state.batches.split
    load = split.load

    def slowly(*arguments: Any, **named: Any) -> Any:
        for one in load(*arguments, **named):
            nap()
            yield one

    object.__setattr__(split, "load", slowly)


def in_turns(state: TrainState) -> None:
    """Delay every other forward; rank 0 begins."""
    steps = iter(range(state.work.env.rank, 10**6))
    state.module.register_forward_pre_hook(lambda *_: None if next(steps) % 2 else nap())


def measure_delays(ranks: list[int]) -> None:
    """Print the skew of each rank for each place of a delay, over 60 steps."""
    print("ranks  delay of 50 ms             ms a step that the others waited, by rank")
    for num_ranks in ranks:
        for delay, slow_ranks in (
            *((one, (1,)) for one in (in_forward, in_backward, in_data)),
            (in_turns, (0, 1)),
        ):
            config = compose_config(
                *("model=toy", "batch.global_size=12", "dataset.num_samples=1200"),
                *("train.eval_every_epochs=0", "train.log_every_steps=10"),
                world_size=num_ranks,
            )
            (_, by_rank), *_ = run_ranks(train_with, num_ranks, config, delay, slow_ranks)
            where = f"{delay.__name__}, rank {' and '.join(map(str, slow_ranks))}"
            print(f"{num_ranks:5}  {where:25}  {by_rank}", flush=True)


def train_with(
    env: DistEnv, config: Config, delay: Callable[[TrainState], None], slow_ranks: tuple[int, ...]
) -> tuple[Trace, Any]:
    """Train with a delay on some ranks."""
    state = build(env, config)
    if env.rank in slow_ranks:
        delay(state)
    trace = run_loop(env, config, max_steps=60, state=state)
    return trace, state.measured["skew_ms_by_rank"]


def measure_calls() -> None:
    """Print the microseconds that the calls of a step, and of a line of ten steps, take alone."""
    timer = StepTimer(torch.device("cpu"))

    def marks() -> None:
        for part in (None, "data", "forward", "backward", "comm", "optimizer"):
            timer.mark(StepPart(part) if part else None)

    def line() -> None:
        times = torch.tensor([1.0, 2.0]).expand(2, BLOCK, 2)
        Skew().add(torch.tensor(times.flatten().tolist()).view_as(times), step_time_ms=3.0)

    for name, call in (("marks of a step", marks), ("line of ten steps, 2 ranks", line)):
        took = []
        for _ in range(50):
            began = time.thread_time()
            for _ in range(100):
                call()
            took.append(1e6 * (time.thread_time() - began) / 100)
        print(f"{name}: {min(took):.1f} us at best, {statistics.median(took):.1f} us median")


def measure_cost(model: str, num_pairs: int) -> None:
    """Print what measuring adds to a step."""
    config = compose_config(*MODELS[model], "train.num_threads=1", world_size=2)
    walls, cpus, step_ms = run_ranks(take_pairs, 2, config, num_pairs, timeout_s=1800.0)[0]
    print(
        f"{model:9} step {step_ms:7.2f} ms  wall time x {_spread(walls, 3)}  "
        f"CPU time of a step {_spread(cpus, 0)} us more",
        flush=True,
    )


def take_pairs(
    env: DistEnv, config: Config, num_pairs: int
) -> tuple[list[float], list[float], float]:
    """Take pairs of blocks of steps, with measuring and without.

    Returns:
        The ratios of their wall times, the additional microseconds of CPU time in a step, and the
        milliseconds of a step without.
    """
    state = build(env, config)
    timer: Any = state.timer
    off = {"mark": lambda *_, **__: None, "mark_end_of_backward": lambda _: None}
    batch = next(iter(state.batches))
    walls, cpus, without_ms = list[float](), list[float](), list[float]()
    for pair in range(-1, num_pairs):  # the first one warms up
        took = dict[bool, tuple[float, float]]()
        for is_on in (True, False) if pair % 2 else (False, True):
            for name in off:
                vars(timer).pop(name, None)
            vars(timer).update({} if is_on else off)
            timer.restart()
            began, began_cpu = time.perf_counter(), time.thread_time()
            for _ in range(BLOCK):
                timer.mark(StepPart.DATA)
                loss = take_step(state, batch)
                timer.add(samples=1)
                timer.mark(None)
            reduce_step_metrics(state, loss, lr=0.1)
            took[is_on] = (time.perf_counter() - began, time.thread_time() - began_cpu)
        if pair >= 0:
            walls.append(took[True][0] / took[False][0])
            cpus.append(1e6 * (took[True][1] - took[False][1]) / BLOCK)
            without_ms.append(1000 * took[False][0] / BLOCK)
    return walls, cpus, statistics.median(without_ms)


def _spread(values: list[float], digits: int) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
