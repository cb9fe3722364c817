"""Training steps that measure what a rank does: its memory, its turns, what it sends.

``train.step=sharding_step.NAME`` names them in a run; the programs of sharding_programs.py call
``take_turn`` themselves. What they measure goes to the folder SHARDING_FOLDER.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_runner.train.step import StepOutput, supervised

Loss = Callable[[Any, Any], Tensor]
FOLDER = Path(os.environ.get("SHARDING_FOLDER", "."))
MEASURED_STEPS = (
    2  # of a memory run: both the first, which makes the optimizer's state, and one with it
)
WATCH_S = 0.02
COUNTED_STEP = 3


def rank() -> str:
    """Return the number of this process's rank."""
    return str(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


class Memory:
    """The peak of a process's resident memory in each phase of its run, in bytes."""

    def __init__(self) -> None:
        """Begin with the phase that builds the model."""
        self.calls, self.peaks = 0, {"start": resident("VmRSS")}
        forget_peak()

    def next_phase(self, ended: str) -> None:
        """Keep the peak of the phase that ends."""
        self.peaks[ended] = resident("VmHWM")
        self.peaks[f"after {ended}"] = resident("VmRSS")
        forget_peak()

    def watch_the_end(self) -> None:
        """Write all peaks now and then until the process ends; the last phase saves the model."""

        def watch() -> None:
            while True:
                found = self.peaks | {"save": resident("VmHWM")}
                path = FOLDER / f"memory-{rank()}.json"
                path.with_suffix(".new").write_text(json.dumps(found))
                path.with_suffix(".new").replace(path)
                time.sleep(WATCH_S)

        threading.Thread(target=watch, daemon=True).start()


def resident(key: str) -> int:
    """Return a figure of this process's memory in bytes: VmRSS now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    """Let the peak begin anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


class MemoryStep:
    """The ordinary training step; it is made before the model, and marks the phases."""

    def __init__(self, loss: Loss, count: str) -> None:
        self.loss, self.count, self.memory = loss, count, Memory()

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss."""
        memory, is_trial = self.memory, not model.training
        if "build" not in memory.peaks:
            memory.next_phase("build")
        if not is_trial:
            memory.calls += 1
            if memory.calls == 1:
                memory.next_phase("trial")
            elif memory.calls == MEASURED_STEPS + 1:
                memory.next_phase("train")
                memory.watch_the_end()
        return supervised(model, batch, loss=self.loss, count=self.count)


def in_turns(model: nn.Module, batch: Any, *, loss: Loss, count: str) -> StepOutput:
    """Return the loss; every few steps wait until it is this program's turn."""
    if model.training:
        take_turn()
    return supervised(model, batch, loss=loss, count=count)


class Turns:
    """The rank's side of programs that train in turns: pipes that tell it to go on, and for what.

    A program has a turn of so many steps. Each rank says how long it took, by the clock and of the
    processor.
    """

    def __init__(self) -> None:
        """Open the rank's pipes; the opener of the other ends waits for it."""
        self.steps = int(os.environ["SHARDING_STEPS"])
        self.go = (FOLDER / f"go-{rank()}").open("rb", buffering=0)
        self.done = (FOLDER / f"done-{rank()}").open("wb", buffering=0)
        self.calls, self.started, self.started_cpu = 0, 0.0, 0.0

    def take(self) -> None:
        """At the end of a turn, report it and wait for the next."""
        if self.calls % self.steps == 0:
            seconds = time.perf_counter() - self.started if self.calls else 0.0
            cpu_s = time.process_time() - self.started_cpu
            self.done.write(f"{seconds} {cpu_s}\n".encode())
            if self.go.read(1) != b"g":
                os._exit(0)  # the measurement is over
            self.started, self.started_cpu = time.perf_counter(), time.process_time()
        self.calls += 1


_turns: list[Turns] = []


def take_turn() -> None:
    """Wait for this program's turn, if it has had one; call it before each step."""
    if not _turns:
        _turns.append(Turns())
    _turns[0].take()


class SentBytes(TorchDispatchMode):
    """Counts the collectives of this rank's main thread, and the bytes of their whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operator, and run it."""
        result = func(*args, **(kwargs or {}))
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        if is_collective and not any(word in func.name() for word in ("wait", "wrap")):
            tensors = [
                one
                for one in torch.utils._pytree.tree_leaves((args, result))
                if isinstance(one, Tensor)
            ]
            largest = max((one.numel() * one.element_size() for one in tensors), default=0)
            self.found.setdefault(func.name(), []).append(largest)
        return result


class BytesStep:
    """The ordinary training step; it counts what one step sends, and writes it."""

    def __init__(self, loss: Loss, count: str) -> None:
        self.loss, self.count, self.calls, self.sent = loss, count, 0, SentBytes()

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss."""
        self.calls += model.training  # else it is tried on two samples
        if not model.training:
            pass
        elif self.calls == COUNTED_STEP:
            self.sent.__enter__()
        elif self.calls == COUNTED_STEP + 1:
            self.sent.__exit__(None, None, None)
            (FOLDER / f"bytes-{rank()}.json").write_text(json.dumps(self.sent.found))
        return supervised(model, batch, loss=self.loss, count=self.count)
