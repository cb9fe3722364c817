"""Traces the steps that ``train.profile`` names with torch.profiler; each rank writes its files."""

import gzip
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from ddp_runner.config.training import WARMUP_STEPS, traced_steps
from ddp_runner.host.hardware import CUDA

NUM_ROWS = 40  # operators in a rank's table
MOST_ENTRIES = 100_000  # allocations of a GPU that are kept, with their stacks


# The history of a CUDA GPU's memory, for https://pytorch.org/memory_viz. Torch documents these
# functions in spite of their names: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
def record_history() -> None:
    """Keep each allocation on a GPU from now on, with the Python stack that asked for it."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")


def dump_history(path: Path) -> None:
    """Write what was kept, and keep nothing more."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


class NullProfiler:
    """Traces nothing: the profiler of a run without ``train.profile``."""

    is_slow = False

    def step_done(self, *_: object) -> None:
        """Do nothing."""

    __exit__ = step_done

    def __enter__(self) -> Self:
        return self


class Profiler:
    """Traces some steps of one rank.

    The loop calls ``step_done`` after each step. As a context manager, it writes what it has traced
    when the run ends earlier, and the GPU's memory when a step runs out of it.

    Args:
        asked: the value of ``train.profile``.
        done: the steps that the run has taken before.
        device: of this rank's computation, the first.
        folder: the run's folder for profiles; each has a folder in it.
        restart_timer: begins a new interval of the step timer, which forgets the slow steps.
        log: takes a sentence for the user.
        warn: takes a warning, which run.json keeps, too.
    """

    def __init__(
        self,
        asked: Any,
        *,
        done: int,
        device: torch.device,
        folder: Path,
        restart_timer: Callable[[], None],
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        steps = traced_steps(asked, done=done)
        self._asked, self._folder = asked, folder
        self._first, self._last = max(steps[0], done + 1), steps[-1]
        self._done, self._device = done, device
        self._restart_timer, self._log, self._warn = restart_timer, log, warn
        self._is_over = self._has_history = False
        # Else Kineto writes to stderr that a trace begins, and that a machine has no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._tracer = profile(
            activities=[ProfilerActivity.CPU] if device.type == "cpu" else supported_activities(),
            schedule=schedule(
                skip_first=self._first - 1,
                wait=0,
                warmup=1,
                active=self._last - self._first + 1,
                repeat=1,
            ),
            record_shapes=True,
        )
        self._tracer.step_num = done  # so that ProfilerStep#N is step N of metrics.jsonl

    @property
    def is_slow(self) -> bool:
        """Whether this step is slower than without a trace; torch prepares in the one before."""
        return not self._is_over and self._first - 1 <= self._done + 1 <= self._last

    def __enter__(self) -> Self:
        self._tracer.start()
        self._begin_step()
        return self

    def __exit__(self, *error: object) -> None:
        if error[1] is None and not self._is_over:
            self._finish()
        elif self._has_history and isinstance(error[1], torch.OutOfMemoryError):
            with suppress(OSError):  # the disk is full, too
                self._folder.mkdir(parents=True, exist_ok=True)
                dump_history(self._folder / f"out-of-memory-rank-{dist.get_rank()}.pickle")

    def step_done(self, step: int) -> None:
        """End a step; after the last one, write the files."""
        if self._is_over:
            return
        self._done = step
        if step == self._last:
            self._finish()
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        is_near = self._done + 1 >= self._first - WARMUP_STEPS
        if self._device.type == CUDA and is_near and not self._has_history:
            record_history()
            self._has_history = True
        self._tracer.step()

    def _finish(self) -> None:
        """Stop, and write what was traced."""
        self._tracer.stop()
        self._is_over = True
        if self._done < self._first:
            self._warn(
                f"train.profile={self._asked} traced nothing: this run ends at step {self._done}, "
                f"before step {self._first}"
            )
            return
        began, steps = time.perf_counter(), f"steps {self._first} to {self._done}"
        folder = self._folder / f"steps-{self._first}-{self._done}"
        try:
            self._write(folder, f"rank-{dist.get_rank()}")
        except OSError as error:  # no reason to lose the training
            for path in folder.glob(f"*rank-{dist.get_rank()}.*"):
                path.unlink()
            self._warn(
                f"the profile of {steps} is not written to {folder} ({error.strerror or error}); "
                "free space or make the folder writable"
            )
        else:
            took_s = time.perf_counter() - began
            self._log(f"traced {steps} into {folder}, written in {took_s:.1f} s")
        self._restart_timer()

    def _write(self, folder: Path, rank: str) -> None:
        """Write the trace, the table of operators and, on a GPU, the history of its memory."""
        folder.mkdir(parents=True, exist_ok=True)
        plain = folder / f"{rank}.json"
        # Not as .gz: torch would write an empty file if the disk of its temporary folder is full.
        self._tracer.export_chrome_trace(str(plain))
        if not plain.exists():  # Kineto raises no error
            raise OSError("torch has written no trace; is the disk full?")
        with plain.open("rb") as file, gzip.open(f"{plain}.gz", "wb") as packed:
            shutil.copyfileobj(file, packed)
        plain.unlink()
        sort_by = f"self_{'cpu' if self._device.type == 'cpu' else 'device'}_time_total"
        table = self._tracer.key_averages().table(sort_by=sort_by, row_limit=NUM_ROWS)
        (folder / f"{rank}.txt").write_text(table, encoding="utf-8")
        if self._has_history:
            dump_history(folder / f"memory-{rank}.pickle")
            self._has_history = False


AnyProfiler = NullProfiler | Profiler


def has_steps_to_trace(asked: Any, *, done: int, folder: Path, warn: Callable[[str], None]) -> bool:
    """Return whether steps of ``train.profile`` are still ahead. See Profiler for the arguments.

    Warn if none are, unless their profile was written before a restart.
    """
    if asked is None:
        return False
    last = traced_steps(asked, done=done)[-1]
    if last <= done and not any(folder.glob(f"steps-*-{last}")):
        warn(
            f"train.profile={asked} traces nothing: this run goes on after step {done}; name later "
            "steps, or their number: train.profile=5"
        )
    return last > done
