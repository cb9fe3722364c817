"""Check right steps of many kinds: a false alarm is a bound that is too small.

python benchmarks/right_steps.py --steps 200

The steps are random combinations of models, modes, precisions, batches, optimizers and seeds. The
table shows how large the differences from one process's step are, as parts of the computed bounds;
FACTOR in ddp_runner/check/one_process.py is chosen by it. Exit code 0: no alarm.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from ranks import end_ranks, run_ranks
from right_steps import MODELS, RightStep, parts_of_bounds, right_steps, world_of
from step_faults import WORLD

AT_ONCE = 8  # steps that the ranks compute in one call
PARTS = (0.5, 0.9, 0.99, 1.0)  # quantiles
LONGEST_S = 600.0


def main() -> None:
    """Run the steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default="|".join(MODELS), help="names, separated by |")
    args = parser.parse_args()
    started, models = time.monotonic(), args.models.split("|")
    chosen = list(islice(right_steps(args.seed, models=models), args.steps))
    alarms, parts = list[str](), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rows = [f"{'good' if row % 2 else 'bad'} text number {row},{row % 2}" for row in range(60)]
        Path("data").mkdir()
        Path("data/own.csv").write_text("\n".join(["review,label", *rows]) + "\n", encoding="utf-8")
        for world_size in sorted(set(WORLD.values())):
            steps = [step for step in chosen if world_of(step) == world_size]
            for first in range(0, len(steps), AT_ONCE):
                some = steps[first : first + AT_ONCE]
                for rank in run_ranks(parts_of_bounds, world_size, some, timeout_s=LONGEST_S):
                    add(rank, some, alarms, parts)
                done = f"{world_size} ranks: {first + len(some)} of {len(steps)}"
                print(f"{done}, {len(alarms)} alarms so far", flush=True)
        end_ranks()
    print(f"\n{len(chosen)} steps in {time.monotonic() - started:.0f} s, {len(alarms)} alarms")
    counts = Counter(f"{step.model}, {step.mode}" for step in chosen)
    print("; ".join(f"{name}: {number}" for name, number in sorted(counts.items())))
    print("| part of its bound | tensors | " + " | ".join(f"{part:.0%}" for part in PARTS) + " |")
    print("| --- |" + " --- |" * (1 + len(PARTS)))
    for stage, values in parts.items():
        ordered = sorted(values)
        cells = [
            f"{ordered[min(int(part * len(ordered)), len(ordered) - 1)]:.2g}" for part in PARTS
        ]
        print(f"| {stage} | {len(ordered):,} | {' | '.join(cells)} |")
    print("\n".join(sorted(set(alarms))))
    sys.exit(bool(alarms))


def add(
    results: list[tuple[str, dict[str, list[float]]]],
    steps: list[RightStep],
    alarms: list[str],
    parts: dict[str, list[float]],
) -> None:
    """Add a rank's results."""
    for step, (fault, by_stage) in zip(steps, results, strict=True):
        if fault:
            alarms.append(f"alarm: {' '.join(step.keys)}: {fault}")
        for stage, values in by_stage.items():
            parts[stage] += values


if __name__ == "__main__":
    main()
