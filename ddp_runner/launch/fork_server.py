"""The process that workers are forked from; it has imported torch, so that a worker starts at once.

Torch-free: the launcher starts it long before it needs torch itself.
"""

import multiprocessing
import select
from multiprocessing import forkserver
from typing import Any

from ddp_runner.host.signals import signals_ignored
from ddp_runner.host.temp_folder import temp_folder


def start_fork_server() -> None:
    """Start it, once, or again if it was killed; return at once.

    It must never start threads or touch CUDA: neither survives a fork.
    """
    temp_folder()
    multiprocessing.set_forkserver_preload(["ddp_runner.launch.preload"])
    with signals_ignored(OPENBLAS_NUM_THREADS="1"):
        forkserver.ensure_running()


def fork_server_is_gone() -> bool:
    """Return whether the server has ended, and with it the workers that it has forked."""
    server: Any = forkserver._forkserver
    # ensure_running would start another; the pipe of which the server holds the other end tells.
    pipe = select.poll()
    pipe.register(server._forkserver_alive_fd, 0)
    return bool(pipe.poll(0))
