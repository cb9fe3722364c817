"""Gloo gets an interface that other machines reach, and links carry whole messages."""

import socket
from pathlib import Path

import pytest

from ddp_runner.host import network
from ddp_runner.host.network import Link, outer_interface, up_interfaces


def test_interfaces_are_read_from_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces that are down or have no address are left out."""
    for name, state in {"eth0": "up", "eth1": "down", "eth2": "up"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    addresses = {"eth0": "10.0.0.5", "eth1": "10.0.0.6"}
    monkeypatch.setattr(network, "_address", addresses.get)
    assert up_interfaces(tmp_path) == {"10.0.0.5": "eth0"}
    assert up_interfaces(tmp_path / "none") == {}


def test_a_message_that_leaves_in_part_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next message would continue its line. The other end may be suspended."""
    monkeypatch.setattr(network, "SEND_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Link(ours), Link(theirs)
        sender.send("word", "x" * 2**24)
        sender.send("another")
        with pytest.raises(ConnectionResetError):
            sender.receive(1.0)
        with pytest.raises(ConnectionResetError):
            list(iter(lambda: receiver.receive(1.0), None))


def test_the_own_loopback_has_its_address() -> None:
    """The kernel gives the answer."""
    assert up_interfaces()["127.0.0.1"] == "lo"


@pytest.mark.parametrize(
    ("own", "other", "routes", "expected"),
    [
        pytest.param("127.0.1.1", "n1", {"n1": "10.1.0.5"}, "ib0", id="by the way to the other"),
        pytest.param(None, "n1", {"n1": "10.1.0.5"}, "ib0", id="a name that does not resolve"),
        pytest.param(
            "127.0.1.1",
            "me",
            {"me": "127.0.0.1", network.ANYWHERE: "10.1.0.5"},
            "ib0",
            id="by the default route, where the other is this machine",
        ),
        pytest.param("127.0.1.1", "me", {}, "eth0", id="the first, without any route"),
        pytest.param("10.0.0.5", "n1", {"n1": "10.1.0.5"}, None, id="the own name is right"),
        pytest.param("127.0.0.1", "127.0.0.1", {}, None, id="all ranks on loopback"),
        pytest.param("127.0.0.1", "localhost", {}, None, id="all ranks on loopback, by name"),
    ],
)
def test_gloo_leaves_loopback_for_an_interface_that_others_reach(
    own: str | None,
    other: str,
    routes: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian gives a machine's own name an address of loopback."""
    interfaces = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "10.1.0.5": "ib0"}
    by_host = {host: (address, "10.1.0.9") for host, address in routes.items()}
    if own is not None:
        by_host[socket.gethostname()] = (own, own)
    monkeypatch.setattr(network, "up_interfaces", lambda: interfaces)
    monkeypatch.setattr(network, "_route", by_host.get)
    assert outer_interface(other) == expected


def test_the_way_to_this_machine_is_loopback() -> None:
    """The kernel says so, and nothing is sent."""
    assert network._route("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert network._route("no-such-host.invalid") is None
