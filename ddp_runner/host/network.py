"""The network interfaces of this machine, and the one by which other machines reach it."""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

INTERFACES = Path("/sys/class/net")
SIOCGIFADDR = 0x8915  # linux/sockios.h
ANYWHERE = "192.0.2.1"  # an address that nobody has: https://www.rfc-editor.org/rfc/rfc5737
ANY_PORT = 9


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
