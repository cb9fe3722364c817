"""Traces the steps of ``train.profile`` with torch.profiler; each rank writes its own files."""

import gzip
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from ddp_runner.config.training import WARMUP_STEPS, traced_steps
from ddp_runner.host.hardware import CUDA

MAX_ALLOCATIONS = 100_000  # recorded on a GPU, with their stacks


# The history of a CUDA GPU's memory, for https://pytorch.org/memory_viz. The functions are
# documented despite their names: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
def record_history() -> None:
    """Record each allocation on a GPU from now on, with its Python stack."""
    torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")


def dump_history(path: Path) -> None:
    """Write the recorded allocations, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


class Profiler:
    """Traces some steps of a rank.

    The loop calls ``step_done`` after each step. As a context manager it writes the trace of a run
    that ends early, and the GPU's memory history when a step runs out of memory.
    """

    def __init__(
        self,
        setting: Any,  # the value of train.profile
        *,
        done: int,  # steps that the run took before this session
        device: torch.device,  # this rank's first
        folder: Path,  # of the run; each profile is a folder in it
        restart_timer: Callable[[], None],  # the step timer forgets the slow steps
        log: Callable[[str], None],
        warn: Callable[[str], None],  # prints a warning and adds it to run.json
    ) -> None:
        steps = traced_steps(setting, done=done)
        self._setting, self._folder = setting, folder
        self._first, self._last = max(steps[0], done + 1), steps[-1]
        self._done, self._device = done, device
        self._restart_timer, self._log, self._warn = restart_timer, log, warn
        self._is_finished = self._has_history = False
        # Otherwise Kineto prints to stderr that a trace begins, and that there is no GPU.
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
        """Whether tracing slows this step; torch prepares in the step before the first."""
        return not self._is_finished and self._first - 1 <= self._done + 1 <= self._last

    def __enter__(self) -> Self:
        self._tracer.start()
        self._begin_step()
        return self

    def __exit__(self, *error: object) -> None:
        if error[1] is None and not self._is_finished:
            self._finish()
        elif self._has_history and isinstance(error[1], torch.OutOfMemoryError):
            self._folder.mkdir(parents=True, exist_ok=True)
            dump_history(self._folder / f"out-of-memory-rank-{dist.get_rank()}.pickle")

    def step_done(self, step: int) -> None:
        """End a step; after the last step, write the files."""
        if self._is_finished:
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
        """Stop tracing and write the files."""
        self._tracer.stop()
        self._is_finished = True
        if self._done < self._first:
            self._warn(
                f"train.profile={self._setting} traced nothing: this run ends at step "
                f"{self._done}, before step {self._first}"
            )
            return
        started, steps = time.perf_counter(), f"steps {self._first} to {self._done}"
        folder = self._folder / f"steps-{self._first}-{self._done}"
        try:
            self._write(folder, f"rank-{dist.get_rank()}")
        except OSError as error:  # a full disk must not end the training
            for path in folder.glob(f"*rank-{dist.get_rank()}.*"):
                path.unlink()
            self._warn(
                f"the profile of {steps} was not written to {folder} ({error.strerror or error}); "
                "free space or make the folder writable"
            )
        else:
            took_s = time.perf_counter() - started
            self._log(f"traced {steps} into {folder}, written in {took_s:.1f} s")
        self._restart_timer()

    def _write(self, folder: Path, rank: str) -> None:
        """Write the trace, the table of operators and, on a GPU, the memory history."""
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"{rank}.json"
        # Not as .gz: torch would write an empty file if the disk of its temporary folder is full.
        self._tracer.export_chrome_trace(str(trace))
        if not trace.exists():  # Kineto raises no error
            raise OSError("torch wrote no trace; is the disk full?")
        with trace.open("rb") as file, gzip.open(f"{trace}.gz", "wb") as packed:
            shutil.copyfileobj(file, packed)
        trace.unlink()
        sort_by = f"self_{'cpu' if self._device.type == 'cpu' else 'device'}_time_total"
        table = self._tracer.key_averages().table(sort_by=sort_by, row_limit=40)
        (folder / f"{rank}.txt").write_text(table, encoding="utf-8")
        if self._has_history:
            dump_history(folder / f"memory-{rank}.pickle")
            self._has_history = False


def has_steps_to_trace(
    setting: Any, *, done: int, folder: Path, warn: Callable[[str], None]
) -> bool:
    """Return whether steps of ``train.profile`` are still ahead. See Profiler for the arguments.

    Warn if all are past, unless their profile was written before a restart.
    """
    if setting is None:
        return False
    last = traced_steps(setting, done=done)[-1]
    if last <= done and not any(folder.glob(f"steps-*-{last}")):
        warn(
            f"train.profile={setting} traces nothing: this run continues after step {done}; give "
            "later steps, or a number of steps: train.profile=5"
        )
    return last > done
