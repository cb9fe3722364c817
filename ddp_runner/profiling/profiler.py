"""Traces the steps that ``train.profile`` names, and has their files written."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_runner.config.profiling import WARMUP_STEPS, traced_steps
from ddp_runner.profiling.cuda_memory import dump_history, record_history
from ddp_runner.profiling.output import NotWrittenError, write_profile
from ddp_runner.profiling.traces import STEP

T = TypeVar("T")


class NullProfiler:
    """Traces nothing: the profiler of a run without ``train.profile``."""

    report = ""
    is_slow = False

    def steps(self, batches: Iterable[T]) -> Iterable[T]:
        """Return the batches themselves."""
        return batches

    def begin(self, *_: object, **__: object) -> None:
        """Do nothing."""

    step_done = close = __exit__ = begin

    def __enter__(self) -> Self:
        return self


class Profiler:
    """Traces some steps of one rank, and gathers the traces of all ranks on rank 0.

    The loop takes its batches from ``steps``, and calls ``begin`` where a part of the step begins
    and ``step_done`` after it. As a context manager, it writes the GPU's memory when a step runs
    out of it.

    Args:
        asked: the value of ``train.profile``.
        done: the steps that the run has taken before.
        device: of this rank's computation, the first.
        folder: the run's folder for profiles; each has a folder in it.
        scratch: see ``write_profile``.
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
        scratch: Path | None,
        restart_timer: Callable[[], None],
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        steps = traced_steps(asked, done=done)
        self._asked, self._folder, self._scratch = asked, folder, scratch
        self._first, self._last = max(steps[0], done + 1), steps[-1]
        self._done, self._on_gpu = done, device.type == "cuda"
        self._restart_timer, self._log, self._warn = restart_timer, log, warn
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        # NCCL tells the bytes of a collective, gloo only the shape.
        self._tracer = profile(
            activities=activities, profile_memory=True, record_shapes=not self._on_gpu
        )
        self.is_slow = False  # whether the steps are slower now than without a trace
        self._is_tracing = self._has_history = self._is_over = False
        self._step, self._part = ExitStack(), ExitStack()
        self.report = ""  # rank 0's summary for the end of the run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """After an out-of-memory error, write what held the GPU's memory."""
        if self._has_history and isinstance(error[1], torch.OutOfMemoryError):
            with suppress(OSError):  # the folder is on another machine, or the disk is full
                self._folder.mkdir(exist_ok=True)
                dump_history(self._folder / f"out-of-memory-rank-{dist.get_rank()}.pickle")

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of an epoch; tracing begins before the first step's batch is taken."""
        iterator = iter(batches)
        while True:
            self._before_step(self._done + 1)
            try:
                batch = next(iterator)
            except StopIteration:
                self._end_step()
                return
            yield batch

    def begin(self, part: str | None) -> None:
        """Name what follows, up to the next call, in the trace; None: it has no name."""
        self._part.close()
        if self._is_tracing and part is not None:
            self._part.enter_context(record_function(part))

    def step_done(self, step: int) -> None:
        """End a step; after the last one gather the traces. Collective: every rank must call."""
        self._done = step
        if self._is_tracing:
            self._end_step()
            if step == self._last:
                self._finish()

    def close(self, *, is_stopped: bool) -> None:
        """End the trace of a run that ends before the last step to be traced.

        Collective: every rank must call.

        Args:
            is_stopped: whether the ranks may soon be killed, so there is no time to write.
        """
        if self._is_tracing and is_stopped:
            self._stop()
            self._log(
                f"the profile of steps {self._first} to {self._last} was stopped with the run: "
                "nothing is written"
            )
        elif self._is_tracing and self._done >= self._first:
            self._finish()
        elif not self._is_over:
            self._warn(
                f"train.profile={self._asked} traced nothing: this run ends at step {self._done}, "
                f"before step {self._first}"
            )

    def _before_step(self, step: int) -> None:
        if self._is_over:
            return
        if self._on_gpu and not self._has_history and step >= self._first - WARMUP_STEPS:
            record_history()
            self._has_history = True
        if not self.is_slow and step >= self._first - 1:
            # Else Kineto writes to stderr that a trace begins, and that a machine has no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._tracer.prepare_trace()
            self.is_slow = True
        if step >= self._first:
            if not self._is_tracing:
                self._start()
            self._end_step()  # what came after the step before, such as an evaluation
            self._step.enter_context(record_function(f"{STEP}{step}"))
            self.begin("data")

    def _start(self) -> None:
        """Start tracing."""
        # On the CPU torch warns of the first free, and each thousandth, of memory that is older
        # than the trace. Here it is, unheard.
        older = torch.empty(1)
        self._tracer.start_trace()
        self._is_tracing = True
        with _stderr_silent():
            del older

    def _end_step(self) -> None:
        self._part.close()
        self._step.close()

    def _stop(self) -> None:
        self._end_step()
        self._tracer.stop_trace()
        self.is_slow = self._is_tracing = False
        self._is_over = True

    def _finish(self) -> None:
        """Stop tracing and write the files. Collective: every rank must call."""
        self._stop()
        began, span = time.perf_counter(), (self._first, self._done)
        steps = "{} to {}".format(*span)
        try:
            self.report = write_profile(
                self._tracer, self._folder, steps=span, on_gpu=self._on_gpu, scratch=self._scratch
            )
        except NotWrittenError as error:  # no reason to lose the training
            self._warn(f"the profile of steps {steps} is not written: {error}")
        else:
            took_s = time.perf_counter() - began
            self._log(f"traced steps {steps} into {self._folder}, written in {took_s:.1f} s")
        self._has_history = False
        self._restart_timer()


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


@contextmanager
def _stderr_silent() -> Iterator[None]:
    """Drop what C++ code writes to stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
