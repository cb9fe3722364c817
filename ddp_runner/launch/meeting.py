"""Opens the store at which the machines of a run meet: one of them serves it, the others connect.

Torch's own client prints stacks of C++ frames while nobody listens, so it starts only once somebody
does.
"""

import errno
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ddp_runner.config.sections import LaunchConfig, meeting_place
from ddp_runner.errors import UserError
from ddp_runner.host.network import is_here
from ddp_runner.host.patience import patiently

STORES: Any = dist  # torch documents its stores, but its stubs lack them
PROBE_S, PAUSE_S = 2.0, 0.5  # of a try to reach the port, and between two
READ_S = 60.0  # of a read from the store, torchrun's
# For a greeting, which another server may send unasked; for the store's own answer.
GREETING_S, ANSWER_S = 0.2, 10.0
OTHER_SERVER = "something else listens there, or it is suspended"


@dataclass(frozen=True)
class Meeting:
    """The open store, and this machine's part in it."""

    store: Any
    address: str  # at which the other machines reach this one
    is_served_here: bool


def open_meeting(launch: LaunchConfig, *, deadline: float, note: Callable[[str], None]) -> Meeting:
    """Serve the store, or wait until another machine does.

    The machine with launch.node_rank=0 serves it; without numbers, the one of launch.rdzv_endpoint.

    Args:
        launch: how the machines meet.
        deadline: a time.monotonic().
        note: is told why the store cannot be reached yet.

    Raises:
        UserError: this machine is to serve the store, and cannot.
        TimeoutError: the deadline has passed.
    """
    host, port = meeting_place(launch)
    number = launch.node_rank
    serves = number == 0
    while True:
        try:
            if serves or (number is None and is_here(host)):
                listener = _listener(host, port)
                if listener is not None:
                    return Meeting(_store(host, port, listener), host, is_served_here=True)
                if serves:
                    raise UserError(
                        f"port {port} of this machine is in use and its launch.node_rank is 0, "
                        "so it holds the rendezvous; give launch.rdzv_endpoint another port"
                    )
            with socket.create_connection((host, port), timeout=PROBE_S) as probe:
                address = probe.getsockname()[0]
                if select.select([probe], [], [], GREETING_S)[0]:
                    raise OSError(OTHER_SERVER)
            return Meeting(_joined(host, port), address, is_served_here=False)
        except OSError as error:
            note(error.strerror or str(error))
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(PAUSE_S)


def _joined(host: str, port: int) -> Any:
    """Return the store that another machine serves.

    Torch's client waits for ever for the answer of another server.

    Raises:
        OSError: no store answers there.
    """
    try:
        return patiently(partial(_store, host, port), limit_s=ANSWER_S)
    except (RuntimeError, TimeoutError) as error:
        raise OSError(OTHER_SERVER) from error


def _store(host: str, port: int, listener: socket.socket | None = None) -> Any:
    options: dict[str, Any] = {"is_master": listener is not None, "multi_tenant": True}
    if listener is not None:
        options["master_listen_fd"] = listener.detach()
    return STORES.TCPStore(host, port, timeout=timedelta(seconds=READ_S), **options)


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on this machine's address; None: somebody else has the port.

    Raises:
        OSError: the port cannot be used.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_loopback = str(address[0]).startswith("127.") or address[0] == "::1"
    # Debian gives a machine's own name an address of loopback, where no other machine reaches it.
    name = address[0] if not is_loopback or host in ("localhost", address[0]) else ""
    for place in (name, ""):  # in a container, `host` may be the address of a gateway
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((place, port))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        else:
            return listener
    return None
