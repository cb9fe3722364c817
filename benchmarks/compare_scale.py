"""What a comparison costs at 100, 1,000 and 10,000 runs, and how large its report is.

python benchmarks/compare_scale.py
python benchmarks/compare_scale.py --runs 10000 --lines 50 --keep /tmp/many

One short training is run for real. The others are copies of its folder with another learning rate,
other losses and, for every second run of a setting, another seed. So half as many settings as runs
are compared, as in a random search. Each command is a process of its own.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import rmtree

import yaml

TRAINING = ("model=toy", "world_size=1", "train.log_every_steps=1", "checkpoint.every_epochs=null")
COMMANDS = {"table": ["--format=table"], "csv": ["--format=csv"], "report": ["--out=report"]}


def main() -> None:
    """Measure each number of runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--lines", type=int, default=50, help="of each metrics.jsonl")
    parser.add_argument("--keep", type=Path, help="write the runs here, and keep them")
    args = parser.parse_args()
    print("seconds of a command, of which CPU; report.html in MiB; peak of memory in MiB")
    columns = ("runs", *(name for key in COMMANDS for name in (key, "cpu")), "html", "memory")
    print("".join(column.rjust(9) for column in columns), flush=True)
    with tempfile.TemporaryDirectory() as temp:
        original = _original(Path(temp, "original"), num_lines=args.lines)
        for count in args.runs:
            folder = (args.keep or Path(temp)) / f"{count}-runs"
            _write_runs(original, folder, count=count, num_lines=args.lines)
            cells = [str(count)]
            for words in COMMANDS.values():
                cells += map("{:.2f}".format, _measure(folder, words))
            page = folder / "report" / "report.html"
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            cells += [f"{page.stat().st_size / 2**20:.1f}", f"{peak:.0f}"]
            print("".join(cell.rjust(9) for cell in cells), flush=True)
            if args.keep is None:
                rmtree(folder)


def _original(folder: Path, *, num_lines: int) -> Path:
    """Train for a moment; return the run's folder."""
    words = [*TRAINING, f"train.max_steps={num_lines}", f"hydra.run.dir={folder}"]
    subprocess.run([sys.executable, "-m", "ddp_runner", *words], check=True, capture_output=True)
    return folder


def _write_runs(original: Path, folder: Path, *, count: int, num_lines: int) -> None:
    """Write the runs: what a comparison reads of them."""
    draw = random.Random(0)
    config = yaml.safe_load((original / ".hydra" / "config.yaml").read_text())
    record = json.loads((original / "run.json").read_text())
    lines = [json.loads(line) for line in (original / "metrics.jsonl").read_text().splitlines()]
    rest = {key: value for key, value in config.items() if key not in ("seed", "optimizer")}
    rest_text = yaml.safe_dump(rest, sort_keys=False)
    lr = 0.0
    for number in range(count):
        run, seed = folder / "runs" / f"{number:05}", number % 2
        (run / ".hydra").mkdir(parents=True)
        lr = lr if seed else float(f"{10 ** draw.uniform(-4, 0):.6g}")
        own = {"seed": seed, "optimizer": {**config["optimizer"], "lr": lr}}
        text = f"---\n{yaml.safe_dump(own)}{rest_text}...\n"
        (run / ".hydra" / "config.yaml").write_text(text)
        factor = draw.uniform(0.5, 2)
        own_lines = [_scaled(line, factor) for line in lines[:num_lines]]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in own_lines))
        own_facts = {"metrics": _scaled(record["metrics"], factor), "config_hash": f"{number:016}"}
        (run / "run.json").write_text(json.dumps({**record, **own_facts}))


def _scaled(values: dict[str, float], factor: float) -> dict[str, float]:
    return {
        key: value * factor if key.startswith(("train/", "eval/")) else value
        for key, value in values.items()
    }


def _measure(folder: Path, words: list[str]) -> tuple[float, float]:
    """Compare the runs; return the seconds of the command, and those of its CPU."""

    def cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    command = [sys.executable, "-m", "ddp_runner.compare", "runs", *words]
    before, start = cpu_s(), time.time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.time() - start, cpu_s() - before


if __name__ == "__main__":
    main()
