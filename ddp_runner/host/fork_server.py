"""The process that ranks are forked from: it imports torch once, so that no rank has to.

The server ends when no process holds the other end of a pipe. multiprocessing has no public name
for that pipe; the private one was checked on CPython 3.11 to 3.13. Torch-free.
"""

import multiprocessing
import os
import select
from multiprocessing import forkserver
from typing import Any

from ddp_runner.host.signals import children_ignore_signals
from ddp_runner.host.temp_folder import temp_folder

PRELOAD = "ddp_runner.launch.preload"  # what the server imports
_SERVER: Any = forkserver._forkserver  # the module's only ForkServer object


def start_fork_server() -> None:
    """Start the server unless it runs, and return at once, long before it has imported torch."""
    temp_folder()
    multiprocessing.set_forkserver_preload([PRELOAD])
    with children_ignore_signals():
        forkserver.ensure_running()


def fork_server_is_gone() -> bool:
    """Return whether the server has ended, and with it the processes that it forked."""
    poll = select.poll()  # unlike ensure_running, it starts no other server
    poll.register(_SERVER._forkserver_alive_fd, 0)
    return bool(poll.poll(0))


def release_fork_server() -> None:
    """Close a rank's copy of the pipe, which would keep the server alive after its launcher."""
    if _SERVER._forkserver_alive_fd is not None:
        os.close(_SERVER._forkserver_alive_fd)
        _SERVER._forkserver_alive_fd = None
