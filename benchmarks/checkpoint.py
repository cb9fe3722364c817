"""How long a checkpoint stops the loop: written by a thread, and written by the loop itself.

python benchmarks/checkpoint.py

One process saves a model of a hundred million parameters with SGD's momentum, 800 MB of state. Each
turn saves it both ways, in alternating order, and flushes the files to disk. Meanwhile the loop
steps a small model, which shows how much the thread slows it down. Read the ratio of the last line.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.training import CheckpointConfig

WIDTH, DEPTH = 2500, 16  # 16 layers of 2500 x 2500: 100 million parameters
STEPS = 40


def main() -> None:
    """Measure in turns and print the seconds of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    state = state_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))))
    size = sum(tensor.nbytes for part in state.values() for tensor in tensors(part)) / 1e6
    step = small_step()
    paused: dict[str, list[float]] = {"thread": [], "loop": []}
    slowed: list[float] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        writer = CheckpointWriter(
            Path(folder, "thread"), CheckpointConfig(keep=1), wire=None, log=print
        )
        with writer:
            for turn in range(args.turns + 1):
                quiet = steps_per_s(step)
                kinds = ["thread", "loop"]
                for kind in kinds if turn % 2 else reversed(kinds):
                    start = time.perf_counter()
                    if kind == "thread":
                        writer.save(state, step=turn, metrics={})
                        paused[kind].append(time.perf_counter() - start)
                        busy = steps_per_s(step)
                        writer.wait()
                    else:
                        save(Path(folder, "loop"), state, step=turn)
                        paused[kind].append(time.perf_counter() - start)
                slowed.append(busy / quiet)
                if turn == 0:  # it allocates the copy's memory and warms the disk cache
                    print(f"first save of {size:.0f} MB: {last_seconds(paused)}", flush=True)
                    paused, slowed = {"thread": [], "loop": []}, []
                else:
                    print(f"turn {turn}: {last_seconds(paused)}, steps at {slowed[-1]:.2f}")
    ratios = [a / b for a, b in zip(*paused.values(), strict=True)]
    print(
        f"median of {args.turns} turns: with the thread the loop stops for "
        f"{statistics.median(ratios):.3f} of the time; during a save its steps run at "
        f"{statistics.median(slowed):.2f} of their speed"
    )


def last_seconds(paused: dict[str, list[float]]) -> str:
    """Return the pause of the last save in both ways."""
    return ", ".join(f"written by the {kind} {all_s[-1]:.2f} s" for kind, all_s in paused.items())


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return a checkpoint's state of a model that has taken a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def small_step() -> Callable[[], None]:
    """Return a training step of a small model."""
    model, inputs = (
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        torch.ones(64, 256),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return step


def steps_per_s(step: Callable[[], None]) -> float:
    """Return the speed of STEPS steps."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return STEPS / (time.perf_counter() - start)


def save(folder: Path, state: dict[str, Any], *, step: int) -> None:
    """Save in the loop."""
    save_checkpoint(
        folder, state, step=step, metrics={}, config=CheckpointConfig(keep=1), log=print
    )


if __name__ == "__main__":
    main()
