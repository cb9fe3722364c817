"""Faults put into a real run: at a step of a rank, at a call of a library, in a file.

A helper of the tests and of benchmarks/kill_campaign.py, not a test. The product knows nothing of
it: a command of ``warm`` is given faults by `prepare`, before its first line, and its ranks have
them since they are forked from it.
"""

import builtins
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from pkgutil import resolve_name
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
COUNTED = {  # the functions whose calls are places; the first one's are a rank's steps
    # What a rank of the loop calls for each step, and a trainer of a parameter server.
    "step": ("ddp_runner.train.loop.train_step", "ddp_runner.train.gradients.backward_by_number"),
    "evaluation": ("ddp_runner.train.loop.evaluate",),
    "log": ("ddp_runner.tracking.tracker.Tracker._add",),
}
DURING = {  # the functions whose own calls of the file system are places
    "save": ("ddp_runner.checkpoint.writer.save_checkpoint",),
    "freeze": ("ddp_runner.tracking.run_dir.RunDir.freeze",),
}


@dataclass(frozen=True)
class At:
    """A place in a run: the beginning of a step that a rank takes.

    Args:
        rank: of the process.
        step: the n-th step that this process takes, from 1.
        attempt: of the worker group, from 0; None: each.
        of: what is counted in place of steps: another key of COUNTED.
    """

    rank: int
    step: int
    attempt: int | None = 0
    of: str = "step"


@dataclass(frozen=True)
class Call:
    """Another place: the n-th call that a save of a checkpoint makes of the file system.

    Args:
        number: from 1, over all saves of this process; each write of a file's bytes is one. None:
            each of them.
        rank: of the process that saves; None: any, the launcher too.
        attempt: of the worker group, from 0; None: each.
        half: whether a write has written half of its bytes by then.
        within: the save in which the number counts, from 1; None: over all of them.
        during: what is counted in place of a save: another key of DURING.
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

    what: Callable[[], object]  # one of this module's functions, or a partial of one
    where: At | Call


def raise_error() -> NoReturn:
    """Raise what a bug raises."""
    raise ZeroDivisionError("the step is cursed")


def exit_with(code: int) -> NoReturn:
    """End without a word, as a library that calls os._exit."""
    os._exit(code)


def system_exit(code: int | str) -> NoReturn:
    """Leave by sys.exit."""
    raise SystemExit(code)


def interrupt() -> NoReturn:
    """Raise KeyboardInterrupt in this rank alone."""
    raise KeyboardInterrupt


def send(signum: int) -> None:
    """Send this process a signal: SIGKILL, SIGSTOP."""
    os.kill(os.getpid(), signum)


def send_launcher(signum: int) -> None:
    """Send the launcher a signal."""
    os.kill(os.getsid(0), signum)  # `warm` gives each command a session


def kill_tree() -> None:
    """Kill the launcher and all that it has started, at once."""
    os.killpg(os.getsid(0), signal.SIGKILL)


def hang() -> None:
    """Stand still in Python, as a deadlock does."""
    threading.Event().wait(FOR_EVER_S)


def slow(seconds: float) -> None:
    """Take so much longer."""
    time.sleep(seconds)


def wait_until(path: str, words: str = "") -> None:
    """Wait until a file is there and holds these words."""
    while not (Path(path).exists() and words in Path(path).read_text()):
        time.sleep(0.01)


def fill_memory() -> NoReturn:
    """Take memory until the kernel has no more to give."""
    held = []
    while True:
        held.append(b"x" * (1 << 24))


def join_group(folder: str) -> None:
    """Become a member of a control group, as do all that this process starts from now on."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))


def lose_stdout(to: str | None) -> None:
    """Let this process have its stdout in another file, or closed, as an interpreter has it."""

    def lose() -> None:
        if to is None:
            os.close(1)
            sys.stdout = sys.__stdout__ = None
        else:
            descriptor = os.open(to, os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.close(descriptor)

    # Only when the program's first line is next: `warm` opens files before it.
    _replace("runpy.run_module", partial(_after, lose))


def together(*functions: Callable[[], object]) -> None:
    """Call one after another; partial of it prepares a command in several ways."""
    for function in functions:
        function()


def fail(number: int) -> NoReturn:
    """Fail as a library call does: ENOSPC, EIO, EROFS."""
    raise OSError(number, os.strerror(number))


def write_pid(path: str) -> None:
    """Write this process's number to a file."""
    Path(path).write_text(str(os.getpid()))


def note(path: str) -> None:
    """Add a byte to a file, by which a test learns how often the place was reached."""
    with Path(path).open("ab") as file:
        file.write(b".")


def install(faults: Sequence[Fault]) -> None:
    """Put faults into this process and all that it forks; `prepare` of a command."""
    for of, paths in COUNTED.items():
        if here := [one for one in faults if isinstance(one.where, At) and one.where.of == of]:
            count = _counted(here)
            for path in paths:
                _replace(path, partial(_after, count))
    for during, paths in DURING.items():
        here = [one for one in faults if isinstance(one.where, Call) and one.where.during == during]
        if here:
            calls = _Calls(here)
            for path in paths:
                _replace(path, calls.watched)
            calls.patch()


def _replace(path: str, changed: Callable[[Any], Any]) -> None:
    """Put another function in the place of one, which a module or a class in it holds."""
    holder, _, name = path.rpartition(".")
    owner = resolve_name(holder)
    setattr(owner, name, changed(getattr(owner, name)))


def prepared(*faults: Fault) -> Callable[[], None]:
    """Return what a command is prepared with."""
    return partial(install, faults)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of the byte at an offset; a negative one counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    """Cut a file off after so many bytes; a negative number is taken off its end."""
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def _is_here(where: At | Call) -> bool:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_rank = where.rank is None or rank == str(where.rank)
    return is_rank and where.attempt in (None, int(attempt))


def _counted(faults: Sequence[Fault]) -> Callable[[], None]:
    taken = 0

    def count() -> None:
        nonlocal taken
        taken += 1
        for fault in faults:
            assert isinstance(fault.where, At)
            if fault.where.step == taken and _is_here(fault.where):
                fault.what()

    return count


def _after(count: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def stepped(*args: Any, **keys: Any) -> Any:
        count()
        return function(*args, **keys)

    return stepped


class _Calls:
    """Counts the calls that some functions make of the file system; lets the n-th one fail."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults, self._thread = faults, 0
        self._taken, self._began, self._taken_before = 0, 0, 0  # over all; of the functions

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls count."""

        @wraps(function)
        def watched(*args: Any, **keys: Any) -> Any:
            self._began, self._taken_before = self._began + 1, self._taken
            self._thread = threading.get_ident()
            try:
                return function(*args, **keys)
            finally:
                self._thread = 0

        return watched

    def patch(self) -> None:
        """Take the place of what Python calls the file system with."""
        for name in CALLS:
            setattr(os, name, self._counting(getattr(os, name)))
        io.open = builtins.open = self._opening(io.open)

    def count(self, half: Callable[[], object] = lambda: None) -> None:
        """Take note of a call; `half` does the half of it."""
        if threading.get_ident() != self._thread:
            return
        self._taken, self._thread = self._taken + 1, 0  # what happens here does not count
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
            return where.number in (None, self._taken)
        is_within = where.within == self._began
        return is_within and where.number in (None, self._taken - self._taken_before)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counting(*args: Any, **keys: Any) -> Any:
            self.count()
            return function(*args, **keys)

        return counting

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
        return written + write(view[written:])  # who lives on writes the rest


NO_SPACE, INPUT_OUTPUT, READ_ONLY = (
    partial(fail, number) for number in (errno.ENOSPC, errno.EIO, errno.EROFS)
)
