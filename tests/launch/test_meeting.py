"""The store at which machines meet: who serves it, on which address, and who must wait."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from commands import free_port

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.launch import meeting
from ddp_runner.launch.meeting import open_store


def opened(
    host: str, port: int, *, number: int | None = None, wait_s: float = 60.0
) -> tuple[Any, bool]:
    """Open the store, and wait no longer than this; return whether it is served here, too."""
    launch = LaunchConfig(rdzv_endpoint=f"{host}:{port}", node_rank=number)
    return open_store(launch, deadline=time.monotonic() + wait_s, note=lambda _: None)


def test_the_first_on_the_machine_serves_and_the_second_joins() -> None:
    """Both see what the other writes."""
    port = free_port()
    first, is_served_by_first = opened("127.0.0.1", port)
    second, is_served_by_second = opened("127.0.0.1", port)
    assert (is_served_by_first, is_served_by_second) == (True, False)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_an_address_of_loopback_is_not_opened_to_the_network() -> None:
    """Nor would any other address be opened than the one that the user names."""
    port = free_port()
    _store, is_served_here = opened("127.0.0.1", port)
    links = psutil.Process().net_connections("inet")
    listening = {link.laddr.ip for link in links if link.laddr.port == port and not link.raddr}
    assert listening == {"127.0.0.1"}
    assert is_served_here


def test_the_machine_with_the_number_0_must_have_the_port() -> None:
    """It cannot join somebody else's store: it is the one that the others look for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this machine is in use and its"):
            opened("127.0.0.1", port, number=0)


@pytest.mark.parametrize(
    ("host", "number", "reason"),
    [
        pytest.param("127.0.0.1", 1, "Connection refused", id="a number that does not serve"),
        pytest.param(
            *("no-such-host.invalid", None, "not known|resolution"),
            id="an unknown name",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_machine_that_cannot_reach_the_store_says_why_and_gives_up_in_time(
    host: str, number: int | None, reason: str
) -> None:
    """It is asked again and again until the deadline."""
    reasons: list[Any] = []
    launch = LaunchConfig(rdzv_endpoint=f"{host}:{free_port()}", node_rank=number)
    with pytest.raises(TimeoutError):
        open_store(launch, deadline=time.monotonic() + 0.6, note=reasons.append)
    assert len(reasons) >= 2
    assert any(word in reasons[0] for word in reason.split("|"))


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH\r\n", b""], ids=["ssh", "silent"])
def test_another_server_at_the_port_is_named(
    monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    """Torch's client would wait for ever, or print its stack."""
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    reasons: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        pool.submit(lambda: server.accept()[0].send(greeting))
        launch = LaunchConfig(rdzv_endpoint=f"127.0.0.1:{server.getsockname()[1]}", node_rank=1)
        with pytest.raises(TimeoutError):
            open_store(launch, deadline=time.monotonic(), note=reasons.append)
    assert reasons == ["something else listens there, or it is suspended"]
