"""How long the loop stands still for a checkpoint: written by a thread, and written by the loop.

python benchmarks/checkpoint.py

A model of a hundred million parameters with SGD's momentum (800 MB of state), on one process. Each
turn saves it both ways, in turns which comes first, with the files flushed to the disk. Between two
saves the loop takes steps on another small model, which shows what the thread costs them meanwhile.
Read the ratio of the last line.
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
from ddp_runner.config.schema import CheckpointConfig

WIDTH, DEPTH = 2500, 16  # 16 layers of 2500 x 2500: 100 million parameters
STEPS = 40


def main() -> None:
    """Measure in turns and print the seconds of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    state = state_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))))
    size = sum(one.nbytes for part in state.values() for one in tensors(part)) / 1e6
    step = small_step()
    paused: dict[str, list[float]] = {"thread": [], "loop": []}
    slowed: list[float] = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        writer = CheckpointWriter(
            Path(folder, "thread"), CheckpointConfig(keep=1), scratch=None, log=print, pinned=False
        )
        with writer:
            for turn in range(asked.turns + 1):
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
                if turn == 0:  # allocates the copy's memory, and warms the disk's cache
                    print(f"first save of {size:.0f} MB: {told(paused)}", flush=True)
                    paused, slowed = {"thread": [], "loop": []}, []
                else:
                    print(f"turn {turn}: {told(paused)}, steps at {slowed[-1]:.2f}", flush=True)
    ratios = [a / b for a, b in zip(*paused.values(), strict=True)]
    print(
        f"median of {asked.turns} turns: the loop stands still for "
        f"{statistics.median(ratios):.3f} of the time; meanwhile its steps are "
        f"{statistics.median(slowed):.2f} times as fast as without a save"
    )


def told(paused: dict[str, list[float]]) -> str:
    """Return the last seconds of both ways."""
    return ", ".join(f"written by the {kind} {one[-1]:.2f} s" for kind, one in paused.items())


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint holds of a model that has taken a step."""
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
    return [
        one for part in (tree.values() if isinstance(tree, dict) else ()) for one in tensors(part)
    ]


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
    """Return the speed of some steps."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return STEPS / (time.perf_counter() - start)


def save(folder: Path, state: dict[str, Any], *, step: int) -> None:
    """Save as the loop itself would."""
    save_checkpoint(
        folder, state, step=step, metrics={}, keep=1, monitor=None, mode="max", log=print
    )


if __name__ == "__main__":
    main()
