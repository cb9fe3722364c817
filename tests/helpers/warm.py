"""Start processes that have imported everything: real commands in a tenth of a second, and ranks.

A command spends seconds on imports: its launcher imports the program, and its fork server imports
torch. Here both are forked from ``warm_server``. All else is real: the command's own process,
session, arguments, environment, folder, standard streams, signals and exit code.

When the launcher asks multiprocessing for a new interpreter (its fork server, or a slot of a
sweep), it gets a spare: a process that was forked before the program's first line, and so is as
fresh as a new interpreter. If no spare is left, a new interpreter starts as usual.
"""

import ctypes
import fcntl
import io
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

# What can start warm, as `python -m MODULE`.
MODULES = ("ddp_runner", "ddp_runner.compare", "ddp_runner.status")
PRELOAD = (
    "ddp_runner.launch.preload",
    "ddp_runner.cli.app",
    "ddp_runner.cli.start_runs",
    "ddp_runner.compare.__main__",
    "ddp_runner.status",
    "composed_once",
    "pytest",  # the ranks' functions are in modules that import it
)
HELPERS = Path(__file__).parent
FIRST_FREE = 200  # no descriptor from here on is in use
MESSAGE_BYTES = 1 << 16  # of a spare's request
LENGTH_BYTES = 8
MOST_PASSED = 16  # descriptors
PR_SET_PDEATHSIG = 1  # linux/prctl.h

MOTHER = "DDP_RUNNER_TEST_MOTHER"  # a variable: the socket of the server that forks servers


@dataclass(frozen=True)
class Server:
    """A server of warm processes, and the link to it."""

    pid: int
    link: socket.socket
    process: subprocess.Popen[bytes] | None = None  # None: another process has forked it

    def has_ended(self) -> bool:
        """Return whether it no longer runs."""
        if self.process is not None:
            return self.process.poll() is not None
        return bool(select.select([self.link], [], [], 0)[0])  # it sends nothing, so this is EOF


# One for each set of variables that choose the device which torch loads when it is imported.
_servers = dict[tuple[str, ...], Server]()


def start_mother(folder: Path) -> subprocess.Popen[bytes]:
    """Start the server that imports everything once for all workers of a test session.

    The workers find it by the variable MOTHER, and ask it to fork a server for each.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "mother"))
    listener.listen()
    os.environ[MOTHER] = str(folder / "mother")
    with listener:
        return _start_program(listener, {}, "mother")


def start_server(environ: Mapping[str, str] | None = None) -> socket.socket:
    """Start the server for commands with these variables unless it runs; return a link to it.

    It returns at once. Call it on the main thread.
    """
    read = dict[str, str]()
    if environ and "SIMGPU_LIBRARY" in environ:
        read = {key: environ[key] for key in ("SIMGPU_LIBRARY", "PYTHONPATH")}
    of_device = tuple(f"{key}={one}" for key, one in sorted(read.items()))
    if of_device in _servers and not _servers[of_device].has_ended():
        return _servers[of_device].link
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if MOTHER in os.environ and not of_device:
            server = Server(_ask_mother(theirs), ours)
        else:
            process = _start_program(theirs, read, "server")
            server = Server(process.pid, ours, process)
    _servers[of_device] = server
    return ours


def _start_program(link: socket.socket, read: Mapping[str, str], role: str) -> Any:
    path = str(HELPERS / "warm_server.py")
    program = [sys.executable, path, role, str(link.fileno()), *PRELOAD]
    own = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # the server must not start threads
    own.pop("PYTHONPATH", None)  # each command has its own
    return subprocess.Popen(
        program, env=own | read, stdin=subprocess.DEVNULL, pass_fds=[link.fileno()]
    )


def _ask_mother(link: socket.socket) -> int:
    """Let the mother fork a server with this link, and return its number."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(os.environ[MOTHER])
        socket.send_fds(asked, [b"."], [link.fileno()])
        return int(asked.recv(LENGTH_BYTES))


def server_pids() -> list[int]:
    """Return the numbers of the servers that run."""
    return [server.pid for server in _servers.values()]


def send(link: socket.socket, message: object) -> None:
    """Send a message that can be pickled; do nothing if the other process has ended."""
    content = pickle.dumps(message)
    with suppress(ConnectionError):
        link.sendall(len(content).to_bytes(LENGTH_BYTES) + content)


def receive(link: socket.socket) -> Any:
    """Return the next message.

    Raises:
        EOFError: the other process has ended.
    """
    try:
        size = int.from_bytes(link.recv(LENGTH_BYTES, socket.MSG_WAITALL))
        content = link.recv(size, socket.MSG_WAITALL) if size else b""
    except ConnectionError:
        content = b""
    return pickle.loads(content)  # EOFError for nothing


class WarmProcess:
    """A process that runs a function, with the interface of ``subprocess.Popen``.

    Args:
        work: runs in the process with this process's ``link``; a function that can be pickled.
        environ: says which devices torch has loaded.
    """

    def __init__(
        self, work: Callable[[socket.socket], object], environ: Mapping[str, str] | None = None
    ) -> None:
        self.args: list[str] = []
        self._exit_code: int | None = None
        # A server that has just been killed, or could not start, is replaced once.
        self.pid = self._forked(start_server(environ)) or self._forked(start_server(environ))
        assert self.pid, "the server of warm processes has ended; what it printed says why"
        send(self.link, (sys.path, pickle.dumps(work)))

    def _forked(self, server: socket.socket) -> int:
        """Ask for a process, and return its number; 0: the server has ended."""
        self.link, theirs = socket.socketpair()
        status, pipe = os.pipe()
        self._status = os.fdopen(status, "rb")
        with theirs, os.fdopen(pipe, "wb"), suppress(ConnectionError):
            socket.send_fds(server, [b"."], [theirs.fileno(), pipe])
        if told := self._status.readline():
            return int(told)
        self.link.close()
        self._status.close()
        for one in _servers.values():
            if one.link is server:
                code = one.process and one.process.wait()
                print(f"the server of warm processes {one.pid} ended: {code}", file=sys.stderr)
        return 0

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal number; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self._exit_code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._exit_code = int(self._status.readline())
            self._status.close()
            self.link.close()
        return self._exit_code

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


class WarmCommand(WarmProcess):
    """A running command.

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
        super().__init__(
            partial(_run, module, list(args), str(folder), dict(environ), spares, prepare), environ
        )
        self.args = [module, *args]


def _run(
    module: str,
    args: list[str],
    folder: str,
    environ: dict[str, str],
    spares: int,
    prepare: Callable[[], None] | None,
    link: socket.socket,
) -> None:
    """Run a command in this process, as its whole program."""
    os.setsid()
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(name, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    link.detach()
    os.closerange(3, FIRST_FREE)
    _open_streams()
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # so that TMPDIR is read again
    if prepare is not None:
        prepare()
    of_tests = [name for name in sys.modules if name.partition(".")[0] in ("pytest", "_pytest")]
    for name in of_tests:
        del sys.modules[name]
    python_path = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *python_path, *sys.path[1:]]  # instead of the folder of warm_server
    _add_spares(spares)
    # runpy warns about a module that is imported already, and the command must see the changes of
    # `prepare`.
    for name in (module, f"{module}.__main__", "ddp_runner.cli.app"):
        if "." in name:
            sys.modules.pop(name, None)
    sys.argv = ["-m", *args]  # runpy replaces the first word by the module's path
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _open_streams() -> None:
    """Open the standard streams, as an interpreter does when it starts."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True
    )


def _add_spares(number: int) -> None:
    """Fork interpreters that wait for their code, and let multiprocessing start these.

    ``spawnv_passfds`` is not documented: multiprocessing has no public way to start its fork server
    from a process that exists, and importing torch takes two seconds.
    """
    spares: list[tuple[int, socket.socket]] = []
    while len(spares) < number:
        spares.append(_fork_spare([link for _, link in spares]))
    start_new = util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
        words = [os.fsdecode(arg) for arg in args]
        code = words[words.index("-c") + 1]
        starts = ("from multiprocessing.forkserver", "from multiprocessing.spawn")
        if not spares or not code.startswith(starts):
            return start_new(path, args, passed)
        pid, link = spares.pop()
        request = {
            "code": code,
            "argv": ["-c", *words[words.index("-c") + 2 :]],
            "folder": str(Path.cwd()),
            "environ": dict(os.environ),
            "held": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "cores": sorted(os.sched_getaffinity(0)),
            "passed": list(passed),
        }
        with link:
            socket.send_fds(link, [json.dumps(request).encode()], [0, 1, 2, *passed])
        return pid

    util.spawnv_passfds = spawnv_passfds


def _fork_spare(earlier: Sequence[socket.socket]) -> tuple[int, socket.socket]:
    """Fork an interpreter; return its number and the link to it.

    Args:
        earlier: the links to those forked before. The new one closes its copies: Python would do so
            at its end, when their numbers belong to other descriptors.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until it has its own mask
    _die_with_parent(signal.SIGKILL)
    for link in (*earlier, ours):
        link.close()
    _wait_for_code(theirs)
    raise SystemExit


def _die_with_parent(signum: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def _wait_for_code(link: socket.socket) -> None:
    """Run the code that the launcher sends; end if the launcher ends."""
    data, received, _, _ = socket.recv_fds(link, MESSAGE_BYTES, MOST_PASSED)
    if not data:
        return
    request = json.loads(data)
    link.close()
    _die_with_parent(0)
    # Move them out of the way first: the number that a descriptor must get may be in use now.
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, FIRST_FREE) for number in received]
    os.closerange(3, FIRST_FREE)
    for number, descriptor in zip([0, 1, 2, *request["passed"]], aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    os.sched_setaffinity(0, request["cores"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["held"])
    sys.argv = request["argv"]
    if request["code"].startswith("from multiprocessing.spawn"):
        _add_spares(1)  # a slot has its own fork server
    exec(request["code"], {"__name__": "__main__"})
