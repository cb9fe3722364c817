"""Inject faults into real runs: at a step of a rank, at a file system call, in a file.

The campaigns in benchmarks/ use it, too. The package has no hook for it: `inject` changes a command
of ``warm`` before its first line, and the ranks inherit the change because they are forked from it.
"""

import builtins
import errno
import io
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

CALLS = (
    "open",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "fsync",
    "write",
    "truncate",
    "ftruncate",
    "link",
    "symlink",
    "utime",
)
FOR_EVER_S = 10_000.0
Target = tuple[Any, Callable[..., Any]]  # a module or class, and its function


@dataclass(frozen=True)
class At:
    """The place of a fault: the beginning of a step.

    Args:
        rank: of the process.
        step: the n-th step that this process takes, from 1.
        attempt: of the worker group, from 0; None for every attempt.
        of: a key of `counted`, to count something else than steps.
    """

    rank: int
    step: int
    attempt: int | None = 0
    of: str = "step"


@dataclass(frozen=True)
class Call:
    """The place of a fault: the n-th file system call of a process while it saves checkpoints.

    Args:
        number: from 1, over all saves of the process; each write to a file is a call. None for
            every call.
        rank: of the process that saves; None for any process, the launcher included.
        attempt: of the worker group, from 0; None for every attempt.
        half: write half of the bytes before the fault, if the call is a write.
        within: count only the calls of this save, from 1; None counts over all saves.
        during: a key of `watched`, to count calls during something else than a save.
    """

    number: int | None
    rank: int | None = 0
    attempt: int | None = 0
    half: bool = False
    within: int | None = None
    during: str = "save"


@dataclass(frozen=True)
class Fault:
    """What happens, and where."""

    what: Callable[[], object]  # a function that can be pickled, or a partial of one
    where: At | Call


def raise_error() -> NoReturn:
    """Raise what a bug raises."""
    raise ZeroDivisionError("an injected error")


def send_signal(signum: int) -> None:
    """Send this process a signal, for example SIGKILL or SIGSTOP."""
    os.kill(os.getpid(), signum)


def send_launcher(signum: int) -> None:
    """Send the launcher a signal."""
    os.kill(os.getsid(0), signum)  # `warm` gives each command a session


def kill_tree() -> None:
    """Kill the launcher and all processes that it has started."""
    os.killpg(os.getsid(0), signal.SIGKILL)


def hang() -> None:
    """Wait in Python, as a deadlock does."""
    threading.Event().wait(FOR_EVER_S)


def wait_until(path: str, words: str = "") -> None:
    """Wait until a file exists and contains these words."""
    while not (Path(path).exists() and words in Path(path).read_text()):
        time.sleep(0.01)


def pause(folder: str) -> None:
    """Create the file `reached` in a folder, and wait for `go` in it."""
    Path(folder, "reached").touch()
    wait_until(str(Path(folder, "go")))


def append_byte(path: str) -> None:
    """Append a byte to a file, whose size then counts how often the place was reached."""
    with Path(path).open("ab") as file:
        file.write(b".")


def lose_stdout(to: str | None) -> None:
    """Redirect this process's stdout to a file, or close it if `to` is None."""

    def lose() -> None:
        if to is None:
            os.close(1)
            sys.stdout = sys.__stdout__ = None
        else:
            descriptor = os.open(to, os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.close(descriptor)

    # Not before the program's first line is next, because `warm` opens files until then.
    _replace((runpy, runpy.run_module), partial(_after, lose))


def call_all(*functions: Callable[[], object]) -> None:
    """Call one function after another; a partial of it prepares a command in several ways."""
    for function in functions:
        function()


def fail(number: int) -> NoReturn:
    """Fail as a library call does, for example with ENOSPC, EIO or EROFS."""
    raise OSError(number, os.strerror(number))


NO_SPACE, INPUT_OUTPUT, READ_ONLY = (
    partial(fail, number) for number in (errno.ENOSPC, errno.EIO, errno.EROFS)
)


def inject(*faults: Fault) -> Callable[[], None]:
    """Return what ``prepare``s a command: it puts the faults into it and all that it forks."""
    return partial(_install, faults)


def flip_bits(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of the byte at an offset; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    """Truncate a file to a size; a negative size is cut off its end."""
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def counted() -> dict[str, list[Target]]:
    """Return the functions whose calls `At` counts."""
    from ddp_runner.own_loop import run
    from ddp_runner.parallelism.parameter_server import Trainer
    from ddp_runner.tracking import metric_files
    from ddp_runner.train import loop, train_task

    files = metric_files.MetricFiles
    return {
        # What a rank of the loop calls in each step, and a trainer of a parameter server.
        "step": [(loop, loop.take_step), (Trainer, Trainer.backward)],
        "own step": [(run.Run, run.Run.should_stop)],
        "evaluation": [(loop, loop.evaluate)],
        "log": [(files, files._add)],
        "end": [(train_task, train_task.export_best)],  # once, on each rank, after the last step
    }


def watched() -> dict[str, list[Target]]:
    """Return the functions in which `Call` counts the file system calls."""
    from ddp_runner.checkpoint import writer
    from ddp_runner.tracking.run_dir import RunDir

    return {"save": [(writer, writer.save_checkpoint)], "freeze": [(RunDir, RunDir.freeze)]}


def _install(faults: Sequence[Fault]) -> None:
    from ddp_runner import distributed

    distributed.VOTE_S = 0.0  # ask at each step, to stop where a fault says
    for of, targets in counted().items():
        if here := [
            fault for fault in faults if isinstance(fault.where, At) and fault.where.of == of
        ]:
            count = _step_counter(here)
            for target in targets:
                _replace(target, partial(_after, count))
    for during, targets in watched().items():
        if here := [
            fault
            for fault in faults
            if isinstance(fault.where, Call) and fault.where.during == during
        ]:
            calls = _Calls(here)
            for target in targets:
                _replace(target, calls.watched)
            calls.patch()


def _replace(target: Target, changed: Callable[[Any], Any]) -> None:
    """Replace a function, where its callers look it up, with what `changed` makes of it."""
    owner, function = target
    setattr(owner, function.__name__, changed(getattr(owner, function.__name__)))


def _is_here(where: At | Call) -> bool:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_rank = where.rank is None or rank == str(where.rank)
    return is_rank and where.attempt in (None, int(attempt))


def _step_counter(faults: Sequence[Fault]) -> Callable[[], None]:
    num_steps = 0

    def count() -> None:
        nonlocal num_steps
        num_steps += 1
        for fault in faults:
            assert isinstance(fault.where, At)
            if fault.where.step == num_steps and _is_here(fault.where):
                fault.what()

    return count


def _after(count: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **keys: Any) -> Any:
        count()
        return function(*args, **keys)

    return counted


class _Calls:
    """Counts the file system calls that some functions make; lets the n-th call fail."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._thread = 0  # the thread whose calls count now; 0: none
        self._num_calls = 0  # over all calls of the functions
        self._num_begun, self._calls_before = 0, 0  # calls of the functions; _num_calls at the last

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its file system calls counted."""

        @wraps(function)
        def watched(*args: Any, **keys: Any) -> Any:
            self._num_begun, self._calls_before = self._num_begun + 1, self._num_calls
            self._thread = threading.get_ident()
            try:
                return function(*args, **keys)
            finally:
                self._thread = 0

        return watched

    def patch(self) -> None:
        """Replace Python's functions for the file system with counting ones."""
        for name in CALLS:
            setattr(os, name, _after(self.count, getattr(os, name)))
        io.open = builtins.open = self._opening(io.open)

    def count(self, half: Callable[[], object] = lambda: None) -> None:
        """Count a call, and let it fail if a fault is here; `half` does half of the call."""
        if threading.get_ident() != self._thread:
            return
        self._num_calls, self._thread = self._num_calls + 1, 0  # a fault's own calls do not count
        try:
            for fault in self._faults:
                assert isinstance(fault.where, Call)
                if self._is_at(fault.where) and _is_here(fault.where):
                    if fault.where.half:
                        half()
                    fault.what()
        finally:
            self._thread = threading.get_ident()

    def _is_at(self, where: Call) -> bool:
        if where.within is None:
            return where.number in (None, self._num_calls)
        is_within = where.within == self._num_begun
        return is_within and where.number in (None, self._num_calls - self._calls_before)

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def opening(file: Any, mode: str = "r", *args: Any, **keys: Any) -> Any:
            if threading.get_ident() != self._thread or not set(mode) & set("wax+"):
                return function(file, mode, *args, **keys)
            self.count()
            raw = _CountingFile(file, mode.replace("b", "").replace("t", ""), self)
            buffered = io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            text = {key: value for key, value in keys.items() if key in ("encoding", "errors")}
            return io.TextIOWrapper(buffered, **text)

        return opening


class _CountingFile(io.FileIO):
    def __init__(self, file: Any, mode: str, calls: _Calls) -> None:
        super().__init__(file, mode)
        self._calls = calls

    def write(self, data: Any, /) -> int:
        view, written = memoryview(data).cast("B"), 0
        write = super().write

        def write_half() -> None:
            nonlocal written
            written = write(view[: len(view) // 2])

        self._calls.count(half=write_half)
        return written + write(view[written:])  # a fault that lets the process live loses nothing
