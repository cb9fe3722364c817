"""How long ranks of a pipeline wait, measured beside the formula (p - 1) / (m v + p - 1).

python benchmarks/pipeline_bubble.py

Two ranks train gpt with m micro-batches of one size. A pipeline without waiting would take m times
the time of one more micro-batch, which is the slope of the step time over m; what a step takes
beyond that is the bubble, with all that a step does once. Times are the least of three
turns, each the median of perf/pipeline_ms. Give it two idle cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS, MICRO_SIZE, NUM_STEPS, TURNS = 2, 4, 12, 3
COUNTS = (2, 4, 8, 16)
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2}  # and the stages of a rank
KEYS = (
    *("model=gpt", "model.num_layers=8", "model.width=256", "dataset.sequence_length=64"),
    *(f"world_size={RANKS}", "parallelism=pp", "train.num_threads=1", "train.log_every_steps=1"),
    *(
        f"train.max_steps={NUM_STEPS}",
        "train.eval_every_epochs=100",
        "checkpoint.every_epochs=null",
    ),
)


def main() -> None:
    """Measure each schedule, and print a row for each number of micro-batches."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("schedule      m  step, ms  bubble  formula")
    for schedule, stages in SCHEDULES.items():
        turns = [
            {count: step_ms(schedule, stages, count) for count in COUNTS} for _ in range(TURNS)
        ]
        times = {count: min(turn[count] for turn in turns) for count in COUNTS}
        slope = (times[COUNTS[-1]] - times[COUNTS[0]]) / (COUNTS[-1] - COUNTS[0])
        for count, time in times.items():
            formula = (RANKS - 1) / (count * stages + RANKS - 1)
            bubble = 1 - count * slope / time
            print(f"{schedule:11} {count:3} {time:9.1f} {bubble:7.0%} {formula:8.0%}", flush=True)


def step_ms(schedule: str, stages: int, count: int) -> float:
    """Return the median time of the schedule in a step, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        own = (
            *(f"parallelism.schedule={schedule}", f"parallelism.stages_per_rank={stages}"),
            *(f"train.grad_accum_steps={count}", f"batch.global_size={MICRO_SIZE * count}"),
            f"hydra.run.dir={folder}/run",
        )
        command = [sys.executable, "-m", "ddp_runner", *KEYS, *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        times = [line["perf/pipeline_ms"] for line in lines if "perf/pipeline_ms" in line]
    return statistics.median(times[2:])  # the first make the schedule


if __name__ == "__main__":
    main()
