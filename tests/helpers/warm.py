"""Start real commands in a tenth of a second: fork them from a server that has imported torch.

benchmarks/kill_campaign.py uses it, too. A command spends seconds on imports: its launcher imports
the program, and its fork server imports torch. Here both are forked from a process that has
imported everything. All else is real: the command's own process, session, arguments, environment,
folder, standard streams, signals and exit code.

When the launcher asks multiprocessing for a new interpreter (its fork server, or a slot of a
sweep), it gets a spare: a process that was forked before the program's first line, and so is as
fresh as a new interpreter. If no spare is left, a new interpreter starts as usual.
"""

import array
import atexit
import ctypes
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest.mock import patch

# What can start warm, as `python -m MODULE`.
MODULES = ("ddp_runner", "ddp_runner.compare", "ddp_runner.status")
PRELOAD = (
    "ddp_runner.launch.preload",
    "ddp_runner.cli.app",
    *(f"{name}.__main__" for name in MODULES[1:]),
    "warm",
)
TESTS = str(Path(__file__).parent)
FIRST_FREE = 200  # no descriptor from here on is in use
MESSAGE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAIN = process.current_process()  # in the server: a process that multiprocessing did not start


def start_server(*others: str) -> None:
    """Start the server that commands and ranks are forked from; return at once.

    Args:
        others: modules to import in addition to what a command needs.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *others])
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    # A fork server must not start threads.
    with patch.dict(os.environ, PYTHONPATH=path, OPENBLAS_NUM_THREADS="1"):
        forkserver.ensure_running()


class WarmCommand:
    """A running command, with the interface of ``subprocess.Popen``.

    Args:
        module: one of MODULES.
        args: the command line after the module.
        folder: where it starts; ``stdout`` and ``stderr`` go to files of these names in it.
        environ: all of its variables.
        spares: how many interpreters it can start without importing anything.
        prepare: runs in the command's process before its first line, so its ranks inherit what it
            changes; a function that can be pickled.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        *,
        folder: Path,
        environ: Mapping[str, str],
        spares: int = 1,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        call = (module, list(args), str(folder), dict(environ), spares, prepare)
        self._process = context.Process(target=_run, args=call)
        self._process.start()
        assert self._process.pid is not None
        self.args, self.pid = [module, *args], self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal number; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(
    module: str,
    args: list[str],
    folder: str,
    environ: dict[str, str],
    spares: int,
    prepare: Callable[[], None] | None,
) -> None:
    """Turn a child of the server into a command, and run it."""
    os.setsid()
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(name, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.closerange(3, FIRST_FREE)
    _open_streams()
    os.environ.clear()
    os.environ.update(environ)
    _forget_the_server()
    if prepare is not None:
        prepare()
    _add_spares(spares)
    # runpy warns about a module that is imported already, and the command must see the changes of
    # `prepare`.
    for name in (module, f"{module}.__main__", "ddp_runner.cli.app"):
        if "." in name:
            sys.modules.pop(name, None)
    sys.argv = ["-m", *args]  # runpy replaces the first word by the module's path
    _run_program(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _forget_the_server() -> None:
    """Remove the traces of multiprocessing, pytest and the server's signal handlers."""
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)) and signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own: Any = process
    own._current_process, own._parent_process, own._children = MAIN, None, set()
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    tempfile.tempdir = None  # so that TMPDIR is read again
    sys.modules.pop("ddp_runner.launch.preload", None)  # importing it has effects
    for name in ("__mp_main__", "pytest", "_pytest"):
        sys.modules.pop(name, None)
    sys.path[:] = [
        str(Path.cwd()),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        *(path for path in sys.path if path not in ("", TESTS)),
    ]


def _open_streams() -> None:
    """Open the standard streams, as an interpreter does when it starts."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True
    )


def _run_program(work: Callable[[], object]) -> None:
    """Run `work` as a whole program, and end the process as an interpreter does."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _add_spares(number: int) -> None:
    """Fork interpreters that wait for their code, and let multiprocessing start these."""
    spares = [_fork_spare() for _ in range(number)]
    start_new = util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
        words = [os.fsdecode(arg) for arg in args]
        code = words[words.index("-c") + 1]
        starts = ("from multiprocessing.forkserver", "from multiprocessing.spawn")
        if not spares or not code.startswith(starts):
            return start_new(path, args, passed)
        pid, link = spares.pop()
        ignored = [
            signum
            for signum in signal.valid_signals()
            if signal.getsignal(signum) == signal.SIG_IGN
        ]
        request = {
            "code": code,
            "argv": ["-c", *words[words.index("-c") + 2 :]],
            "folder": str(Path.cwd()),
            "environ": dict(os.environ),
            "ignored": sorted(map(int, ignored)),
            "cores": sorted(os.sched_getaffinity(0)),
            "passed": list(passed),
        }
        descriptors = array.array("i", [0, 1, 2, *passed])
        link.sendmsg(
            [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        link.close()
        return pid

    util.spawnv_passfds = spawnv_passfds


def _fork_spare() -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    _die_with_parent(signal.SIGKILL)  # a later spare holds the other end of the link, too
    ours.close()
    _wait_for_code(theirs)
    os._exit(0)


def _die_with_parent(signum: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def _wait_for_code(link: socket.socket) -> None:
    """Run the code that the launcher sends; end if the launcher ends."""
    size = socket.CMSG_SPACE(16 * array.array("i").itemsize)
    data, ancillary, _, _ = link.recvmsg(MESSAGE_BYTES, size)
    if not data:
        return
    received = array.array("i")
    for _, _, content in ancillary:
        received.frombytes(content)
    request = json.loads(data)
    link.close()
    _die_with_parent(0)
    # Move them out of the way first: the number that a descriptor must get may be in use now.
    aside = [os.dup2(number, FIRST_FREE + place) for place, number in enumerate(received)]
    os.closerange(3, FIRST_FREE)
    for number, descriptor in zip([0, 1, 2, *request["passed"]], aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.sched_setaffinity(0, request["cores"])
    for signum in request["ignored"]:
        signal.signal(signum, signal.SIG_IGN)
    sys.argv = request["argv"]
    if request["code"].startswith("from multiprocessing.spawn"):
        _add_spares(1)  # a slot has its own fork server
    _run_program(lambda: exec(request["code"], {"__name__": "__main__"}))
