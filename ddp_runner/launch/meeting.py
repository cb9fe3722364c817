"""Opens the store at which the machines of a run meet: one serves it, and the others connect."""

import errno
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ddp_runner.config.sections import LaunchConfig, meeting_place
from ddp_runner.errors import UserError
from ddp_runner.host.network import is_here, is_loopback
from ddp_runner.host.patience import patiently

STORES: Any = dist  # torch documents its stores, but its stubs lack them
PROBE_S, PAUSE_S = 2.0, 0.5  # of a try to reach the port, and between two
READ_S = 60.0  # of a read from the store, torchrun's
# For a greeting, which another server may send unasked; for the store's own answer.
GREETING_S, ANSWER_S = 0.2, 10.0
OTHER_SERVER = "something else listens there, or it is suspended"


def open_store(
    launch: LaunchConfig, *, deadline: float, note: Callable[[str], None]
) -> tuple[Any, bool]:
    """Return the store at which the machines meet, and whether this machine serves it.

    The machine with launch.node_rank=0 serves it; without numbers, that of launch.rdzv_endpoint.
    Torch's client would print stacks of C++ frames while nobody listens, and wait for ever for the
    answer of another server, so it starts only once a server is there.

    Args:
        launch: how the machines meet.
        deadline: a time.monotonic().
        note: gets the reason why the store cannot be reached yet.

    Raises:
        UserError: this machine must serve the store, and cannot.
        TimeoutError: the deadline has passed.
    """
    host, port = meeting_place(launch)
    must_serve = launch.node_rank == 0
    options = {"multi_tenant": True, "timeout": timedelta(seconds=READ_S)}
    client = partial(STORES.TCPStore, host, port, is_master=False, **options)
    while True:
        try:
            if must_serve or (launch.node_rank is None and is_here(host)):
                listener = _listener(host, port)
                if listener is not None:
                    options["master_listen_fd"] = listener.detach()
                    return STORES.TCPStore(host, port, is_master=True, **options), True
                if must_serve:
                    raise UserError(
                        f"port {port} of this machine is in use and its launch.node_rank is 0, "
                        "so it holds the rendezvous; give launch.rdzv_endpoint another port"
                    )
            with socket.create_connection((host, port), timeout=PROBE_S) as probe:
                if select.select([probe], [], [], GREETING_S)[0]:
                    raise OSError(OTHER_SERVER)
            try:
                return patiently(client, limit_s=ANSWER_S), False
            except (RuntimeError, TimeoutError) as error:
                raise OSError(OTHER_SERVER) from error
        except OSError as error:
            note(error.strerror or str(error))
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(PAUSE_S)


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on this machine's address; None: another process has the port.

    Raises:
        OSError: the port cannot be used.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Debian gives a machine's own name an address of loopback, where no other machine reaches it.
    is_own_name = is_loopback(str(address[0])) and host not in ("localhost", address[0])
    for place in ("" if is_own_name else str(address[0]), ""):
        try:
            return socket.create_server((place, port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno != errno.EADDRNOTAVAIL:  # in a container, that of a gateway
                raise
    return None
