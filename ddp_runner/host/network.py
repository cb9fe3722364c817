"""How this machine reaches others: its interfaces, the port it serves, links for messages."""

import errno
import fcntl
import ipaddress
import json
import math
import socket
import struct
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

INTERFACES = Path("/sys/class/net")
SIOCGIFADDR = 0x8915  # linux/sockios.h
ANYWHERE = "192.0.2.1"  # an address that nobody has: https://www.rfc-editor.org/rfc/rfc5737
BEAT_S = 1.0  # between two beats of a link
SILENT_S = 5.0  # without a message, after which the other end of a link counts as silent
SEND_S = 2.0  # the most that sending a message may take: the network may be down
MOST_BYTES = 2**20  # of a message


def up_interfaces(folder: Path = INTERFACES) -> dict[str, str]:
    """Return the names of this machine's interfaces that are up, by address; empty off Linux."""
    by_address = {}
    for path in sorted(folder.glob("*/operstate")):
        # Loopback and tunnels have no state to report.
        is_up = path.read_text().strip() in ("up", "unknown")
        if is_up and (address := _address(path.parent.name)) is not None:
            by_address[address] = path.parent.name
    return by_address


def is_here(host: str) -> bool:
    """Return whether a name or an address is this machine's, so that a socket can bind to it.

    Raises:
        OSError: the name does not resolve.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def outer_interface(other: str) -> str | None:
    """Return the interface for gloo to use; None: gloo chooses well itself, or there is no other.

    gloo takes the address of this machine's own name. Debian gives that name a loopback address,
    which other machines cannot reach. `other` is a machine of the run, perhaps this machine.
    """
    gloo_route = _route(socket.gethostname())
    is_reachable = gloo_route is not None and not is_loopback(gloo_route[1])
    if is_reachable or other == "localhost" or other.startswith("127."):
        return None
    by_address = up_interfaces()
    outer = [name for address, name in by_address.items() if not is_loopback(address)]
    routes = [_route(host) for host in (other, ANYWHERE)]
    routed = [by_address.get(route[0], "") for route in routes if route is not None]
    return next((name for name in (*routed, *outer) if name in outer), None)


def _route(host: str) -> tuple[str, str] | None:
    """Return this machine's address and the host's on the route to it; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # any port
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    return None  # the name does not resolve, or there is no route


def _address(name: str) -> str | None:
    """Return an interface's IPv4 address, if it has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    return None


def listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on this machine's address; None: another process has the port.

    Raises:
        OSError: the port cannot be used.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Debian gives a machine's own name a loopback address, which other machines cannot reach.
    is_own_name = is_loopback(str(address[0])) and host not in ("localhost", address[0])
    for interface in ("" if is_own_name else str(address[0]), ""):
        try:
            return socket.create_server((interface, port), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno != errno.EADDRNOTAVAIL:  # in a container: the address of a gateway
                raise
    return None


class Link:
    """One end of a connection that carries lines of JSON; any thread may send, one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_S)
        self.socket, self._sending, self._rest = connection, threading.Lock(), b""
        self.heard_at, self._beat_at = time.monotonic(), -math.inf

    def send(self, word: str, value: object = None) -> None:
        """Send a message. If the other end is gone, ``receive`` notices."""
        with self._sending, suppress(OSError):
            try:
                self.socket.sendall(json.dumps([word, value]).encode() + b"\n")
            except TimeoutError:  # after half a message, no other can follow
                self.socket.shutdown(socket.SHUT_RDWR)

    def beat(self, value: object = None) -> None:
        """Send a beat if one is due."""
        if time.monotonic() > self._beat_at + BEAT_S:
            self._beat_at = time.monotonic()
            self.send("beat", value)

    def receive(self, timeout_s: float) -> list[list[Any]]:
        """Return the messages that have come, each a word and a value.

        Raises:
            OSError: the other end is gone.
            ValueError, RecursionError: the other end is not a launcher of ours.
        """
        if not wait([self.socket], timeout_s):  # select() takes no descriptor above 1023
            return []
        data = self.socket.recv(MOST_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > MOST_BYTES:
            raise ConnectionResetError("the connection was closed")
        messages = [json.loads(line) for line in lines]
        self.heard_at = time.monotonic()
        return messages

    def is_silent(self) -> bool:
        """Return whether no message has come for SILENT_S."""
        return time.monotonic() > self.heard_at + SILENT_S
