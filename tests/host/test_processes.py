"""The private pipe of multiprocessing's fork server exists, and shows whether the server lives."""

import os
import signal
from multiprocessing import forkserver, get_context
from typing import Any

from ddp_runner.host.processes import fork_server_is_gone, release_fork_server


def hold_and_release() -> None:
    """Run in a fresh interpreter: a server lives, is killed, and is released."""
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
