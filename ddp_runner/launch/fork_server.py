"""Starts the process that ranks are forked from; it imports torch once, so that no rank has to.

Torch-free: the launcher starts it long before it needs torch itself.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

from ddp_runner.host.signals import children_ignore_signals
from ddp_runner.host.temp_folder import temp_folder


def start_fork_server() -> None:
    """Start the server unless it runs, and return at once.

    It must never start threads or touch CUDA: neither survives a fork.
    """
    temp_folder()
    multiprocessing.set_forkserver_preload(["ddp_runner.launch.preload"])
    with children_ignore_signals(), _environ_default("OPENBLAS_NUM_THREADS", "1"):
        forkserver.ensure_running()


@contextmanager
def _environ_default(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while, unless it is set."""
    was_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not was_set:
            del os.environ[name]
