"""From a command to its first step and from the last to its end, beside the least that torch needs.

python benchmarks/start.py

The floor is two processes, started at once, that import torch and what DDP imports (torch._dynamo),
meet by gloo and take a step. Each turn measures the runner and the floor. Read the ratio of the
last line. Further arguments are the runner's: python benchmarks/start.py experiment=mnist_ddp
train.max_steps=50
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_RANKS = 2
DEFAULTS = ("model=toy", "train.max_steps=20")


def main() -> None:
    """Measure in turns; print the medians of both timelines and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of the floor
    arguments, overrides = parser.parse_known_args()
    if arguments.rank is not None:
        print(json.dumps(rank_marks()), flush=True)
        os._exit(0)  # gloo's threads sometimes abort a plain script at its end
    turns: dict[str, list[dict[str, float]]] = {"runner": [], "floor": []}
    for turn in range(arguments.turns):
        for name in sorted(turns, reverse=turn % 2 == 0):
            marks = run_floor() if name == "floor" else run_runner(overrides or DEFAULTS)
            turns[name].append(marks)
            shown = ", ".join(f"{mark} {seconds:.2f}" for mark, seconds in marks.items())
            print(f"turn {turn + 1}, {name}: {shown}", flush=True)
    for name, measured in turns.items():
        medians = {mark: statistics.median(m[mark] for m in measured) for mark in measured[0]}
        print(f"median, {name}: " + ", ".join(f"{k} {v:.2f}" for k, v in medians.items()))
    pairs = zip(*turns.values(), strict=True)
    ratios = [runner["first step"] / floor["first step"] for runner, floor in pairs]
    print(
        f"first step: {statistics.median(ratios):.2f} times the floor "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


def run_runner(overrides: tuple[str, ...] | list[str]) -> dict[str, float]:
    """Run a command; return the seconds from its start to each mark, and of its end."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "run"
        command = ("-m", "ddp_runner", *overrides, f"world_size={NUM_RANKS}")
        start = time.time()
        process = subprocess.Popen(
            [sys.executable, *command, f"hydra.run.dir={folder}"], stdout=subprocess.DEVNULL
        )
        marks = {"torch imported": first_rank(process) - start}
        if process.wait():
            sys.exit(f"the command ended with {process.returncode}")
        ended, record = time.time(), json.loads((folder / "run.json").read_text())
        modified = {path.name: path.stat().st_mtime for path in folder.rglob("*")}
        marks = {"composed": modified[".lock"] - start} | marks
        # Rank 1 writes its line once the model is built and tried.
        marks |= {"model built": modified["rank-1.log"] - start}
        marks["first step"] = record["started_at"] + record["startup_s"] - start
        marks["last metrics"] = modified["metrics.jsonl"] - start
        marks["last write"] = modified["run.json"] - start
        marks["end"] = ended - start
        return marks | {"end after last write": ended - modified["run.json"]}


def first_rank(process: "subprocess.Popen[bytes]") -> float:
    """Wait until a command's fork server has forked a process, and return the time.

    A forked process has the command line of the server; its imports start other processes, too.
    """
    while process.poll() is None:
        forked = [pid for child in _children(process.pid) for pid in _children(child)]
        if any(b"multiprocessing.forkserver" in _read(pid, "cmdline") for pid in forked):
            break
        time.sleep(0.01)
    return time.time()


def _children(pid: int) -> list[int]:
    return [int(word) for word in _read(pid, f"task/{pid}/children").split()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def run_floor() -> dict[str, float]:
    """Start the floor's processes at once; return the seconds to each mark of the slower."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(NUM_RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    start = time.time()
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, f"--rank={rank}"],
            env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(NUM_RANKS)
    ]
    marks = [json.loads(process.communicate()[0]) for process in processes]
    return {name: max(rank[name] for rank in marks) - start for name in marks[0]}


def rank_marks() -> dict[str, float]:
    """Take a step of DDP as a rank; return the time of each mark."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    marks = {"torch imported": time.time()}
    import torch._dynamo  # the constructor of DDP imports it

    marks["dynamo imported"] = time.time()
    dist.init_process_group("gloo")
    marks["group up"] = time.time()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks["model built"] = time.time()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return marks | {"first step": time.time()}


if __name__ == "__main__":
    main()
