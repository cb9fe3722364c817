"""The processes of a run: the server that forks ranks, stop signals, and how processes end.

The fork server imports torch once for all ranks, and ends when no process holds the other end of a
pipe. That pipe, and the ids of the server and the resource tracker, have private names only, which
were checked on CPython 3.11 to 3.13. On Linux the server, and after it the launcher, adopts the
children of a rank that has ended, to kill them. Torch-free.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_runner.host.temp_folder import temp_folder

# Ctrl-C, schedulers and `kill`, a closed terminal, Ctrl-\, and what Slurm's --signal=USR1@60 sends.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
import_errors: list[str] = []  # of the fork server, when it imported torch and the worker
# The only instance of each class.
_SERVER: Any = forkserver._forkserver
_TRACKER: Any = resource_tracker._resource_tracker
PROC = Path("/proc")
IMPORTED_AT = time.time()  # at the start of a command, before any session of its runs
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TRACKER = "ddp_runner.tracking.track"  # a command that sends what remains after a run, then ends
WITHOUT_WARNING = "ignore:resource_tracker:UserWarning"  # Python's option -W
KILL_S = 5.0  # for killed processes to end; a process in uninterruptible sleep may not
TUNABLES = "GLIBC_TUNABLES"


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process was not started to ignore.

    nohup ignores SIGHUP, and a shell ignores SIGINT for a script's background jobs: these signals
    must not end the process.
    """
    return tuple(sig for sig in STOP_SIGNALS if signal.getsignal(sig) != signal.SIG_IGN)


def ignore_stop_signals(*, but: int = 0) -> None:
    """Ignore the stop signals, also those held back: another process decides when this one ends."""
    for signum in set(STOP_SIGNALS) - {but}:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Let the kernel signal this process when its parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


@contextmanager
def answering(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the stop signals with `handler` inside the block."""
    before = {signum: signal.signal(signum, handler) for signum in handled_signals()}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold the stop signals back while children start and call ``ignore_stop_signals``.

    Ctrl-C and SIGTERM may reach every process at once. The launcher must get each signal, and a
    child must not die of it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        _start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Python has unblocked two of them
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server() -> None:
    """Start the server unless it runs, and return at once, long before it has imported torch."""
    temp_folder()
    # A cleaner may have removed it, and the server's socket with it.
    Path(util.get_temp_dir()).mkdir(parents=True, exist_ok=True)
    if _SERVER._forkserver_pid is not None and (
        fork_server_is_gone() or not Path(_SERVER._forkserver_address).exists()
    ):
        stop_fork_server()
    multiprocessing.set_forkserver_preload(["ddp_runner.launch.preload"])
    # glibc reads it when the server starts. Large pages for tensors, where Linux gives them on
    # request, make a step with a few MiB of activations a twentieth faster.
    chosen = os.environ.get(TUNABLES)
    os.environ[TUNABLES] = chosen or "glibc.malloc.hugetlb=1"
    try:
        with stop_signals_held():
            forkserver.ensure_running()
    finally:
        os.environ[TUNABLES] = chosen or ""
        if chosen is None:
            del os.environ[TUNABLES]


def stop_fork_server() -> None:
    """Kill the server if it runs; none of its ranks may run."""
    if _SERVER._forkserver_pid is not None:
        # It has ended, or has no socket yet, or whoever started us ignores the end of children.
        with suppress(ProcessLookupError, FileNotFoundError, ChildProcessError):
            os.kill(_SERVER._forkserver_pid, signal.SIGKILL)
            _SERVER._stop()  # waits for its end: until then multiprocessing believes that it runs
        _SERVER._forkserver_pid = None


def _start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, without its warnings.

    Ranks skip the interpreter's shutdown and leave the semaphores of a user's progress bars to it.
    Its warning would follow the last line of the run.
    """
    sys.warnoptions.append(WITHOUT_WARNING)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(WITHOUT_WARNING)


def fork_server_is_gone(*, within_s: float = 0.0) -> bool:
    """Return whether the server has ended, and with it the processes that it forked.

    Wait for it for `within_s`: the kernel closes a killed server's files one by one.
    """
    poll = select.poll()  # unlike ensure_running, this starts no other server
    poll.register(_SERVER._forkserver_alive_fd, 0)
    return bool(poll.poll(1000 * within_s))


def release_fork_server() -> None:
    """Close a rank's copy of the pipe, which would keep the server alive after its launcher."""
    if _SERVER._forkserver_alive_fd is not None:
        os.close(_SERVER._forkserver_alive_fd)
        _SERVER._forkserver_alive_fd = None


def adopt_orphans() -> None:
    """Become the parent of each descendant that loses its parent. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Return the children of this process; Linux only, empty elsewhere."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def end_descendants(earlier: Collection[int], *, spares_trackers: bool = True) -> None:
    """Kill the fork server's children and this process's, with all their descendants.

    Children in `earlier` are spared and, with `spares_trackers`, trackers that still send. A copy
    that a tracker has forked looks the same, so after waiting for the trackers spare only those in
    `earlier`.
    """
    deadline, server = time.monotonic() + KILL_S, _SERVER._forkserver_pid
    spared = {*earlier, server, _TRACKER._pid}  # either of the last two may be new
    while time.monotonic() < deadline:
        parents = _parents()
        new = {pid for pid, parent in parents.items() if parent == os.getpid()} - spared
        roots = {pid for pid in new if not (spares_trackers and _is_tracker(pid))}
        roots |= {pid for pid, parent in parents.items() if parent == server}
        if not roots:
            break
        for pid in _with_descendants(roots, parents):
            _kill(pid)
        time.sleep(0.01)


def kill_descendants() -> None:
    """Kill all descendants of this process, except trackers, which end on their own."""
    for pid in _with_descendants({os.getpid()}, _parents()) - {os.getpid()}:
        _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):  # it has ended, or is no child of ours
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)


def _with_descendants(roots: set[int], parents: Mapping[int, int]) -> set[int]:
    """Return the roots and all their descendants, except trackers."""
    family = set(roots)
    while generation := {
        pid
        for pid, parent in parents.items()
        if parent in family and pid not in family and not _is_tracker(pid)
    }:
        family |= generation
    return family


def _is_tracker(pid: int) -> bool:
    return TRACKER in kernel_text(PROC / str(pid) / "cmdline").split("\0")


def is_suspended(pid: int | None) -> bool:
    """Return whether a process is stopped (man 5 proc_pid_stat). Linux only."""
    return kernel_text(PROC / str(pid) / "stat").rpartition(")")[2].split()[:1] == ["T"]


def process_stats() -> Iterator[tuple[int, list[int]]]:
    """Yield each process id of this machine, and the fields of /proc/PID/stat after the state.

    The first field is the parent (man 5 proc_pid_stat). Empty if there is no /proc.
    """
    for path in PROC.glob("[0-9]*/stat"):
        # PID (NAME) STATE PARENT …, and the name may hold anything.
        fields = kernel_text(path).rpartition(")")[2].split()[1:]
        if fields:
            yield int(path.parent.name), list(map(int, fields))


def _parents() -> dict[int, int]:
    return {pid: fields[0] for pid, fields in process_stats()}


def kernel_text(path: Path) -> str:
    """Return the text of a file in /proc or /sys; empty if it is missing or its process ended."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
