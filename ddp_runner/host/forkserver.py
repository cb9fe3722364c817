"""The private part of multiprocessing's fork server: the pipe by which it notices that it is alone.

The server ends when no process holds the pipe's other end. multiprocessing has no public name for
it. Checked on CPython 3.11 to 3.13.
"""

import os
import select
from multiprocessing import forkserver
from typing import Any

_SERVER: Any = forkserver._forkserver  # the module's only ForkServer object


def fork_server_is_gone() -> bool:
    """Return whether the server has ended, and with it the processes that it forked.

    `ensure_running` would tell as well, but starts another one.
    """
    poll = select.poll()
    poll.register(_SERVER._forkserver_alive_fd, 0)
    return bool(poll.poll(0))


def release_fork_server() -> None:
    """Close this process's end of the pipe, which a forked worker inherits.

    The worker would keep the server alive after the launcher's end.
    """
    if _SERVER._forkserver_alive_fd is not None:
        os.close(_SERVER._forkserver_alive_fd)
        _SERVER._forkserver_alive_fd = None
