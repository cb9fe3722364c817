"""A sweep of eight toy runs, and the same eight as torchrun commands of a plain script, in turns.

python benchmarks/sweep.py

It measures whole processes, from the command to its end, because that is what a user waits for.
Both take twenty steps on one and two ranks with four learning rates; only the runner writes run
folders. The order alternates between turns. Read the ratio of the last line.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RATES = (0.001, 0.003, 0.01, 0.03)
WORLD_SIZES = (1, 2)
STEPS = 20
SCRIPT = Path(__file__).with_name("toy_tutorial.py")


def main() -> None:
    """Measure in turns and print the seconds of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    seconds: dict[str, list[float]] = {"runner": [], "torchrun": []}
    for turn in range(turns):
        programs = [("runner", run_sweep), ("torchrun", run_scripts)]
        for name, program in programs if turn % 2 == 0 else reversed(programs):
            start = time.perf_counter()
            program()
            seconds[name].append(time.perf_counter() - start)
        ratio = seconds["torchrun"][-1] / seconds["runner"][-1]
        print(
            f"turn {turn + 1}: one sweep {seconds['runner'][-1]:.1f} s, eight torchrun commands "
            f"{seconds['torchrun'][-1]:.1f} s, {ratio:.1f} times as long",
            flush=True,
        )
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    print(f"median of {turns} turns: {statistics.median(ratios):.1f} times as long")


def run_sweep() -> None:
    """Run the eight as one sweep."""
    with tempfile.TemporaryDirectory() as folder:
        rates, sizes = (",".join(map(str, values)) for values in (RATES, WORLD_SIZES))
        command = (
            "-m", "ddp_runner", "-m", "model=toy", f"optimizer.lr={rates}",
            f"world_size={sizes}", f"train.max_steps={STEPS}", f"hydra.sweep.dir={folder}",
        )  # fmt: skip
        _run(sys.executable, *command)
        num_runs = len(list(Path(folder).glob("*/metrics.jsonl")))
        if num_runs != len(RATES) * len(WORLD_SIZES):
            sys.exit(f"the sweep left {num_runs} runs")


def run_scripts() -> None:
    """Run the eight one after the other."""
    for rate, size in itertools.product(RATES, WORLD_SIZES):
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        script = (str(SCRIPT), f"--lr={rate}", f"--steps={STEPS}")
        # gloo's threads sometimes abort a plain script at its end, after all its work is done.
        _run(sys.executable, *launcher, *script, proof="loss ")


def _run(*command: str, proof: str | None = None) -> None:
    """Run a command; its exit code does not matter if it printed the proof that it did its work."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not (proof and proof in done.stdout):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
