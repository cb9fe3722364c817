"""The interfaces of this machine, and the one that other machines reach."""

from pathlib import Path

import pytest

from ddp_runner.host import network
from ddp_runner.host.network import Interface, outer_interface

ETH = Interface("eth0", "10.0.0.5")


def test_interfaces_are_read_from_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are down, too."""
    for name, state in {"eth0": "up", "eth1": "down"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    addresses = {"eth0": "10.0.0.5"}
    monkeypatch.setattr(network, "_address", addresses.get)
    assert network.interfaces(tmp_path) == [ETH, Interface("eth1", None, is_up=False)]
    assert network.interfaces(tmp_path / "none") == []


def test_the_own_loopback_has_its_address() -> None:
    """By the kernel's own answer."""
    found = {one.name: one for one in network.interfaces()}
    assert found["lo"].address == "127.0.0.1"
    assert found["lo"].is_up


def test_a_name_that_does_not_resolve_has_no_address() -> None:
    """The top-level domain is reserved for this."""
    assert network.host_address("localhost") == "127.0.0.1"
    assert network.host_address("no-such-host.invalid") is None


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
    found = [Interface("lo", "127.0.0.1"), ETH, Interface("ib0", "10.1.0.5")]
    monkeypatch.setattr(network, "interfaces", lambda: found)
    monkeypatch.setattr(network, "host_address", lambda _: own)
    monkeypatch.setattr(network, "_own_address", routes.get)
    assert outer_interface(other) == expected


def test_the_way_to_this_machine_is_loopback() -> None:
    """Asked of the kernel; nothing is sent."""
    assert network._own_address("127.0.0.1") == "127.0.0.1"
    assert network._own_address("no-such-host.invalid") is None
