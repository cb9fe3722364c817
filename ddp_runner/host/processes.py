"""The processes of a run: the server that forks ranks, what stops them, how their children end.

The fork server imports torch once, so that no rank has to. It ends when no process holds the other
end of a pipe. multiprocessing has no public name for that pipe, nor for the process ids of its
server and its resource tracker; the private ones were checked on CPython 3.11 to 3.13.

On Linux the fork server, and after it the launcher, adopts the children of a rank that has ended,
so that they can be ended. Elsewhere they are left alone. Torch-free.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

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
import_errors: list[str] = []  # why the fork server, whose child this is, lacks what it imports
# The only object of each module.
_SERVER: Any = forkserver._forkserver
_TRACKER: Any = resource_tracker._resource_tracker
PROC = Path("/proc")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TRACKER = "ddp_runner.tracking.track"  # a command that has something left to send, and then ends
WITHOUT_WARNING = "ignore:resource_tracker:UserWarning"  # Python's option -W
LIMIT_S = 5.0  # for killed processes to be gone; one in uninterruptible sleep is left behind
# From the launcher's end to that of a rank which the fork server has not ended by then. The server
# first ends what this rank has started, and finds it only below a rank.
SERVER_GRACE_S = 5.0


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process was not started to ignore.

    nohup ignores SIGHUP, and a shell ignores SIGINT for a script's background jobs: whoever started
    the process does not want these signals to end it.
    """
    return tuple(one for one in STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN)


def ignore_stop_signals(*, but: int = 0) -> None:
    """Ignore the stop signals in this process, also held ones: another one decides when it ends."""
    for signum in set(STOP_SIGNALS) - {but}:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Let the kernel signal this process when its parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def die_with_launcher() -> None:
    """Make a slot of a sweep end when its launcher does, even by SIGKILL."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def wait() -> None:
        launcher.join()
        end_after_launcher()

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
    if sys.platform == "linux":
        die_with_parent()
        release_fork_server()


def end_after_launcher() -> NoReturn:
    """End this process, whose launcher is gone, unless the fork server does so first."""
    time.sleep(SERVER_GRACE_S if sys.platform == "linux" else 0.0)
    os._exit(128 + signal.SIGKILL)


@contextmanager
def answering(
    signals: Iterable[int], handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> Iterator[None]:
    """Answer the signals by this handler while the block lasts."""
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold the stop signals back while children start, which first call ``ignore_stop_signals``.

    Ctrl-C and SIGTERM may reach every process at once, and only the launcher decides what follows:
    it must lose none, and a child must not die of one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        _start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Python has released two of them
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server() -> None:
    """Start the server unless it runs, and return at once, long before it has imported torch."""
    temp_folder()
    # It may have been cleaned away, and the server's socket with it.
    Path(util.get_temp_dir()).mkdir(parents=True, exist_ok=True)
    if _SERVER._forkserver_pid is not None and (
        fork_server_is_gone() or not Path(_SERVER._forkserver_address).exists()
    ):
        with suppress(FileNotFoundError):
            _SERVER._stop()  # waits for its end: until then multiprocessing believes that it runs
    multiprocessing.set_forkserver_preload(["ddp_runner.launch.preload"])
    with stop_signals_held():
        forkserver.ensure_running()


def _start_resource_tracker() -> None:
    """Start the process that removes what others leave behind, and let it do so in silence.

    Ranks end without the interpreter's shutdown, so the semaphores of a user's progress bars are
    left to it. Its warning of them would follow the last line of the run.
    """
    sys.warnoptions.append(WITHOUT_WARNING)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(WITHOUT_WARNING)


def fork_server_is_gone(*, within_s: float = 0.0) -> bool:
    """Return whether the server has ended, and with it the processes that it forked.

    The kernel closes a killed server's files one after the other, and this pipe may be the last.
    """
    poll = select.poll()  # unlike ensure_running, it starts no other server
    poll.register(_SERVER._forkserver_alive_fd, 0)
    return bool(poll.poll(1000 * within_s))


def release_fork_server() -> None:
    """Close a rank's copy of the pipe, which would keep the server alive after its launcher."""
    if _SERVER._forkserver_alive_fd is not None:
        os.close(_SERVER._forkserver_alive_fd)
        _SERVER._forkserver_alive_fd = None


def adopt_orphans() -> None:
    """Become the parent of each descendant that loses its own parent. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Return the children of this process; none unless on Linux."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def end_descendants(own: Collection[int], *, spares_trackers: bool = True) -> None:
    """Kill the fork server's children, those of this process but its own, and all below.

    A tracker that still sends is spared. A copy that it has forked looks the same, so whoever has
    waited for the trackers spares none but its own.
    """
    deadline, server = time.monotonic() + LIMIT_S, _SERVER._forkserver_pid
    spared = {*own, server, _TRACKER._pid}  # either may be new
    while time.monotonic() < deadline:
        parents = _parents()
        found = {
            pid
            for pid, parent in parents.items()
            if parent == server
            or (
                parent == os.getpid()
                and pid not in spared
                and not (spares_trackers and _is_tracker(pid))
            )
        }
        if not found:
            break
        for pid in _with_descendants(found, parents):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_descendants() -> None:
    """Kill all descendants of this process, except trackers, which end by themselves."""
    for pid in _with_descendants({os.getpid()}, _parents()) - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _with_descendants(roots: set[int], parents: Mapping[int, int]) -> set[int]:
    """Return the roots and all below them, except trackers."""
    found = set(roots)
    while more := {
        pid
        for pid, parent in parents.items()
        if parent in found and pid not in found and not _is_tracker(pid)
    }:
        found |= more
    return found


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):  # it has just ended
        return TRACKER.encode() in Path(PROC, str(pid), "cmdline").read_bytes().split(b"\0")
    return False


def is_suspended(pid: int | None) -> bool:
    """Return whether a process is stopped (man 5 proc_pid_stat). Linux only."""
    with suppress(OSError):
        return Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def process_stats() -> Iterator[tuple[int, list[int]]]:
    """Yield each process of this machine, and its fields from /proc/PID/stat after the state.

    The parent is the first of them (man 5 proc_pid_stat). Empty if there is no /proc.
    """
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            # PID (NAME) STATE PARENT …, and the name may hold anything.
            _, *fields = path.read_bytes().rpartition(b")")[2].split()
            yield int(path.parent.name), list(map(int, fields))


def _parents() -> dict[int, int]:
    return {pid: fields[0] for pid, fields in process_stats()}
