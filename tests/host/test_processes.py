"""A private pipe tells whether multiprocessing's fork server is alive; it ends in silence."""

import os
import signal
import subprocess
import sys
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import pytest

from ddp_runner.host.processes import (
    TUNABLES,
    fork_server_is_gone,
    release_fork_server,
    start_fork_server,
    stop_fork_server,
)


def hold_and_release() -> None:
    """Run in a fresh interpreter: a server starts, is killed, and is released."""
    forkserver.ensure_running()
    assert not fork_server_is_gone()
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)
    os.waitpid(server._forkserver_pid, 0)
    assert fork_server_is_gone()
    descriptor = server._forkserver_alive_fd
    release_fork_server()
    assert server._forkserver_alive_fd is None
    try:
        os.fstat(descriptor)
    except OSError:
        release_fork_server()  # a second time does nothing
        os._exit(42)


def test_the_pipe_of_the_fork_server_tells_its_end_and_can_be_released() -> None:
    """It fails when CPython renames what the adapter uses."""
    process = get_context("spawn").Process(target=hold_and_release)
    process.start()
    process.join()
    assert process.exitcode == 42


LEAVES_A_SEMAPHORE = """
from multiprocessing import get_context
from ddp_runner.host.processes import start_fork_server

start_fork_server()
code = "import multiprocessing as m, os; lock = m.get_context('spawn').RLock(); os._exit(0)"
rank = get_context("forkserver").Process(target=exec, args=(code,))
rank.start()
rank.join()
assert rank.exitcode == 0
"""


@pytest.mark.full
def test_a_semaphore_that_a_rank_leaves_behind_causes_no_warning() -> None:
    """Progress bars have one, and a warning of it would follow the last line of the run."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_A_SEMAPHORE],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert ended.stderr == ""


@pytest.mark.parametrize("chosen", [None, "glibc.malloc.hugetlb=0"])
def test_ranks_get_large_pages_unless_the_user_decides(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server inherits the variable, and glibc reads it only when a program starts."""
    monkeypatch.setenv(TUNABLES, chosen or "")
    if chosen is None:
        monkeypatch.delenv(TUNABLES)
    given = list[str]()
    monkeypatch.setattr(forkserver, "ensure_running", lambda: given.append(os.environ[TUNABLES]))
    start_fork_server()
    assert given == [chosen or "glibc.malloc.hugetlb=1"]
    assert os.environ.get(TUNABLES) == chosen


STARTS_A_CHILD = """
import os, signal, subprocess, sys
from ddp_runner.host.processes import stop_signals_held

received = []
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, lambda signum, _: received.append(signum))
code = "import ddp_runner.host.processes as p; p.ignore_stop_signals(); input(); print('alive')"
with stop_signals_held():
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.killpg(0, signum)
    assert received == []
assert sorted(received) == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
child.communicate("go on\\n")
"""


def test_signals_while_a_child_starts_reach_the_launcher_alone() -> None:
    """A launcher that ignores them for that long loses Ctrl-C, and the run goes on."""
    ended = subprocess.run(
        [sys.executable, "-c", STARTS_A_CHILD],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
        start_new_session=True,
    )
    assert ended.stdout == "alive\n"


def stop_and_start() -> None:
    """Run in a fresh interpreter: a server is stopped, twice, and another one starts."""
    server: Any = forkserver._forkserver
    stop_fork_server()  # there is none
    forkserver.ensure_running()
    first = server._forkserver_pid
    stop_fork_server()
    stop_fork_server()
    assert not Path(f"/proc/{first}").exists()
    forkserver.ensure_running()
    assert server._forkserver_pid not in (None, first)
    assert not fork_server_is_gone()
    os._exit(42)


def test_a_server_ends_where_the_end_of_children_is_ignored() -> None:
    """As below `trap '' CHLD`: nobody can wait for it, and another one can start."""
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "from ddp_runner.host import processes; "
        "[(processes.start_fork_server(), processes.stop_fork_server()) for _ in range(2)]; "
        "print('ended')"
    )
    command = [sys.executable, "-c", code]
    end = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (end.stdout, end.stderr) == ("ended\n", "")


def test_a_stopped_server_is_replaced() -> None:
    """By one with the variables that the command has set since."""
    process = get_context("spawn").Process(target=stop_and_start)
    process.start()
    process.join()
    assert process.exitcode == 42
