"""How this machine reaches others: its interfaces, the port that it serves, links for messages."""

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
ANY_PORT = 9
BEAT_S = 1.0  # between two beats of a link
SILENT_S = 5.0  # the other end of a link that has not been heard for so long is hardly there
SEND_S = 2.0  # for a message to leave: the network may be down
MOST_BYTES = 2**20  # of a message that is not complete yet


def up_interfaces(folder: Path = INTERFACES) -> dict[str, str]:
    """Return the interfaces of this machine that are up, by address; none unless on Linux."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    # Loopback and tunnels have no state to report.
    up = [
        name
        for name in names
        if (folder / name / "operstate").read_text().strip() in ("up", "unknown")
    ]
    return {address: name for name in up if (address := _address(name)) is not None}


def host_address(name: str) -> str | None:
    """Return the address to which this machine's own name resolves; None: it does not."""
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    return None


def is_here(host: str) -> bool:
    """Return whether a name or an address is this machine's.

    Raises:
        OSError: it is not known.
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
    """Return the interface for gloo if it would take one that other machines cannot reach.

    gloo takes the address of this machine's own name. Debian gives that name an address of
    loopback, where no other machine reaches it. None: gloo's choice is right, or there is no other.

    Args:
        other: the name or the address of a machine that this one works with, perhaps its own.
    """
    own = host_address(socket.gethostname())
    is_reached = own is not None and not is_loopback(own)
    if is_reached or other == "localhost" or other.startswith("127."):
        return None
    by_address = up_interfaces()
    outer = [name for address, name in by_address.items() if not is_loopback(address)]
    routed = [by_address.get(_own_address(place) or "") for place in (other, ANYWHERE)]
    return next((name for name in (*routed, *outer) if name in outer), None)


def _own_address(other: str) -> str | None:
    """Return the address from which this machine would reach another; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, ANY_PORT))
        return str(probe.getsockname()[0])
    return None


def _address(name: str) -> str | None:
    """Return an interface's IPv4 address; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        packed = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    return None


def listener(host: str, port: int) -> socket.socket | None:
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
            except TimeoutError:  # half a message may have left, so none can follow
                self.socket.shutdown(socket.SHUT_RDWR)

    def beat(self, value: object = None) -> None:
        """Send a beat if one is due."""
        if time.monotonic() > self._beat_at + BEAT_S:
            self._beat_at = time.monotonic()
            self.send("beat", value)

    def receive(self, timeout_s: float) -> list[list[Any]]:
        """Return the messages that have come, as word and value.

        Raises:
            OSError: the other end is gone.
            ValueError: it does not speak as a launcher does.
        """
        if not wait([self.socket], timeout_s):  # select() takes no descriptor above 1023
            return []
        data = self.socket.recv(MOST_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > MOST_BYTES:
            raise ConnectionResetError("the connection was closed")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        self.heard_at = time.monotonic()
        return messages

    def is_silent(self) -> bool:
        """Return whether nothing has come for a while."""
        return time.monotonic() > self.heard_at + SILENT_S
