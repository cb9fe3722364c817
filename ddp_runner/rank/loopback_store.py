"""The store at whose port the ranks of one machine meet; other machines cannot reach it.

torch's own server listens on every interface and has no authentication.
"""

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed

from ddp_runner.dist_env import FROM_ENVIRONMENT, DistEnv
from ddp_runner.errors import UserError

dist: Any = torch.distributed  # its stores are documented, but not in torch's stubs
HOST = "127.0.0.1"


def loopback_store(env: DistEnv, *, init_method: str | None, timeout: timedelta) -> Any:
    """Return the store, which rank 0 serves; None: there is no port. Collective: every rank.

    Args:
        env: this rank's place; all ranks are on one machine.
        init_method: env:// or tcp://HOST:PORT; the host is this machine.
        timeout: how long to wait for the other ranks.

    Raises:
        UserError: rank 0 cannot listen on the port.
    """
    if (port := _port(init_method)) is None:
        return None
    if not env.is_rank_zero:
        return dist.TCPStore(HOST, port, env.world_size, is_master=False, timeout=timeout)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart takes the same port
    try:
        listener.bind((HOST, port))
        listener.listen(env.world_size)
    except OSError as error:
        listener.close()
        raise UserError(
            f"rank 0 cannot listen on port {port} ({error.strerror}), where the ranks meet; give "
            "every rank another port, in MASTER_PORT or launch.init_method"
        ) from error
    return dist.TCPStore(
        HOST,
        port,
        env.world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _port(init_method: str | None) -> int | None:
    """Return the port that a rendezvous names; None if there is none, or torch rejects it later."""
    with suppress(ValueError):
        if init_method == FROM_ENVIRONMENT:
            return int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else None
        if init_method is not None and init_method.startswith("tcp://"):
            return urlsplit(init_method).port
    return None
