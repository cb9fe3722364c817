"""Interfaces, the host's name, and which interface the backends take, with faked ones."""

import pytest

from ddp_runner.doctor import network
from ddp_runner.doctor.finding import Level
from ddp_runner.host.network import Interface

LO = Interface("lo", "127.0.0.1")
ETH = Interface("eth0", "10.0.0.5", 1500, 10_000)
IB = Interface("ib0", "10.1.0.5", 4092, 200_000)
DOCKER = Interface("docker0", "172.17.0.1", 1500)
OFF = Interface("eth1", "10.2.0.5", 1500, None, is_up=False)


def test_interfaces_are_shown_with_their_speed() -> None:
    """A machine may have many; loopback is none of them."""
    first, second = network.show([LO, ETH, OFF])
    assert (first.level, first.value) == (Level.OK, "eth0 10.0.0.5, MTU 1500, 10 Gbit/s")
    assert (second.level, second.value) == (Level.WARNING, "eth1 10.2.0.5, MTU 1500, down")
    many = [Interface(f"eth{n}", f"10.0.0.{n + 1}", 1500) for n in range(9)]
    assert [one.value for one in network.show(many)][-1] == "and 3 more"
    assert [one.value for one in network.show([LO])] == [
        "loopback only: this machine can work alone"
    ]


@pytest.mark.parametrize(
    ("address", "level", "says"),
    [
        ("10.0.0.5", Level.OK, "n1 is 10.0.0.5 (eth0)"),
        ("127.0.1.1", Level.WARNING, "which other machines cannot reach"),
        ("10.9.9.9", Level.WARNING, "which no interface here has"),
        (None, Level.WARNING, "n1 does not resolve"),
    ],
)
def test_the_own_name_must_be_an_address_that_others_reach(
    address: str | None, level: Level, says: str
) -> None:
    """Debian's installer writes 127.0.1.1; the advice names the interface to take."""
    (finding,) = network.own_name("n1", address, [LO, OFF, ETH])
    assert (finding.level, says in finding.value) == (level, True)
    assert level == Level.OK or "GLOO_SOCKET_IFNAME=eth0" in str(finding.advice)


@pytest.mark.parametrize(
    ("environ", "found", "values"),
    [
        ({}, [LO, ETH], ["eth0, by the host name", "eth0"]),
        ({}, [LO, DOCKER, ETH, IB], ["eth0, by the host name", "ib0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, [ETH, IB], ["ib0, by GLOO_SOCKET_IFNAME", "ib0"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, [ETH, IB], ["eth0, by the host name", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "^ib,lo"}, [LO, ETH, IB], ["eth0, by the host name", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [ETH], ["eth0, by the host name", "names =eth"]),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, [ETH], ["names eth7, which has no address", "eth0"]),
    ],
)
def test_which_interface_a_backend_takes(
    environ: dict[str, str], found: list[Interface], values: list[str]
) -> None:
    """A variable that names none that is there is a problem."""
    findings = list(network.chosen(environ, "10.0.0.5", found, has_gpus=True))
    for finding, value in zip(findings, values, strict=True):
        assert value in finding.value
        assert (finding.level == Level.PROBLEM) == ("names " in value)
    assert len(list(network.chosen(environ, "10.0.0.5", found, has_gpus=False))) == 1
