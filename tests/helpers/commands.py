"""Run real commands in processes of their own, and look at these processes."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from run_folders import run_dirs
from warm import MODULES, WarmCommand

RUNNER = (sys.executable, "-m", "ddp_runner")
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2")
TIME_LIMIT_S = 600.0  # far above the usual: a busy machine is no failure
# The runner inside a program that prints at the end whether torch was imported.
WATCH_TORCH = """
import runpy, sys
sys.argv[0] = "ddp_runner"
try:
    runpy.run_module("ddp_runner", run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules)
"""
Started = subprocess.Popen[str] | WarmCommand


@dataclass(frozen=True)
class CommandResult:
    """How a command ended; its runs are below the folder that it was started in."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def run_dirs(self) -> list[Path]:
        """Every run folder, by name."""
        return run_dirs(self.folder)

    @property
    def run_dir(self) -> Path:
        """The only run folder."""
        (only,) = self.run_dirs
        return only


def run_command(
    *args: str,
    folder: Path,
    program: Sequence[str] = RUNNER,
    environ: Mapping[str, str | None] | None = None,
    **options: Any,
) -> CommandResult:
    """Run a command in `folder` to its end; see ``background``."""
    with background(*args, folder=folder, program=program, environ=environ, **options) as process:
        return wait_for_end(process, folder)


@contextmanager
def background(
    *args: str,
    folder: Path,
    program: Sequence[str] = RUNNER,
    environ: Mapping[str, str | None] | None = None,
    fresh: bool = False,
    spares: int = 1,
    prepare: Callable[[], None] | None = None,
) -> Iterator[Started]:
    """Start a command in a session of its own; kill what is left of it at the end of the block.

    Args:
        args: the command line.
        folder: where it starts; created if it does not exist.
        program: what runs the command line. Our own programs are forked from a server that has
            imported everything; see ``warm``.
        environ: variables to add; None removes one.
        fresh: start our own program in a new interpreter, too.
        spares: interpreters that the command starts; a sweep with slots starts two for each slot.
        prepare: changes a warm command's process before its first line; see ``warm``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed = {**os.environ, **(environ or {})}
    variables = {key: value for key, value in changed.items() if value is not None}
    is_ours = tuple(program[:2]) == RUNNER[:2] and len(program) == 3 and program[2] in MODULES
    process: Started
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        if is_ours and not fresh:
            process = WarmCommand(
                program[2], args, folder=folder, environ=variables, spares=spares, prepare=prepare
            )
        else:
            assert prepare is None, "a new interpreter cannot be prepared"
            process = subprocess.Popen(
                [*program, *args],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
    try:
        yield process
    finally:
        for pid in session_pids(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_for_end(process: Started, folder: Path) -> CommandResult:
    """Wait until a command has ended; after the time limit, fail with its output."""
    try:
        process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end in time:\n{(folder / 'stdout').read_text()}") from None
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return CommandResult(process.returncode, stdout, stderr, folder)


def wait_for(
    condition: Callable[[], Any], *, timeout_s: float = TIME_LIMIT_S, every_s: float = 0.02
) -> Any:
    """Poll a condition; return its first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            what = inspect.getsource(condition).strip()
            raise AssertionError(f"not true within {timeout_s} s: {what}")
        time.sleep(every_s)
    return value


def wait_until_gone(process: Started) -> None:
    """Wait until no process of a command is left, including its ranks."""
    wait_for(lambda: not session_pids(process.pid))


def error_line(result: CommandResult, *, exit_code: int = 2) -> str:
    """Return the only line on stderr of a command that failed, without ``error: ``."""
    assert (result.exit_code, "Traceback" in result.stderr + result.stdout) == (exit_code, False), (
        result.stderr
    )
    (line,) = filter(None, result.stderr.splitlines())
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def session_pids(launcher_pid: int) -> list[int]:
    """Return the living processes of a command, including those that outlived their parents."""
    pids = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has ended meanwhile
            is_ours = os.getsid(process.pid) == launcher_pid
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def command_line(process: psutil.Process) -> str:
    """Return a process's command line; empty if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def fork_server(launcher_pid: int) -> psutil.Process:
    """Return the process that a launcher's ranks are forked from."""
    children = psutil.Process(launcher_pid).children()
    words = ("multiprocessing.forkserver", "warm_server.py")  # a new interpreter, or a warm one
    (server,) = [one for one in children if any(word in command_line(one) for word in words)]
    return server


def rank_logs(launcher_pid: int) -> Iterator[tuple[Path, psutil.Process]]:
    """Yield each rank below a launcher with the log file that it holds open."""
    try:
        descendants = psutil.Process(launcher_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return  # the launcher has ended meanwhile
    for process in descendants:
        with suppress(psutil.Error):
            for file in process.open_files():
                if Path(file.path).name.startswith("rank-"):
                    yield Path(file.path), process


def rank_processes(launcher_pid: int) -> dict[int, psutil.Process]:
    """Return the ranks of a launcher's only run by their number."""
    ranks = dict[int, psutil.Process]()
    for log, process in rank_logs(launcher_pid):
        # What a rank has started holds its log open as well.
        ranks.setdefault(int(log.stem.removeprefix("rank-")), process)
    return ranks


def free_port() -> int:
    """Return a port of loopback that nothing uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
