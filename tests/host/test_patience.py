"""Calls that block: how long they may, what is printed meanwhile, and a request to stop."""

import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from ddp_runner.host import patience
from ddp_runner.host.patience import StoppedError, patiently

FOR_EVER_S = 600.0


@pytest.fixture(name="block")
def blocking_call() -> Iterator[Callable[[], None]]:
    """Give a call that waits as a read from a store does whose machine is gone."""
    over = threading.Event()
    yield lambda: over.wait(FOR_EVER_S) and None
    over.set()


def fail() -> NoReturn:
    """Fail as the call itself does."""
    raise ZeroDivisionError("its own")


def test_what_a_call_returns_or_raises_arrives() -> None:
    """The thread between makes no difference."""
    assert patiently(lambda: 5, limit_s=FOR_EVER_S) == 5
    with pytest.raises(ZeroDivisionError, match="its own"):
        patiently(fail, limit_s=FOR_EVER_S)


def test_a_call_that_blocks_is_left_at_its_limit_or_when_a_stop_is_requested(
    block: Callable[[], None],
) -> None:
    """Whichever comes first."""
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        patiently(block, limit_s=0.2)
    with pytest.raises(StoppedError):
        patiently(block, limit_s=FOR_EVER_S, stop_requested=lambda: True)


def test_a_long_wait_is_explained_once_and_again_when_the_reason_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line for a short wait, none without words, and none twice."""
    texts = ["two are missing", "two are missing", "", "one is missing", "one is missing"]
    assert patiently(lambda: None, limit_s=FOR_EVER_S, notice=lambda: "too early") is None
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    asked = iter(texts)
    over = threading.Event()

    def notice() -> str:
        text = next(asked, None)
        if text is None:
            over.set()
        return text or ""

    patiently(lambda: over.wait(FOR_EVER_S), limit_s=FOR_EVER_S, notice=notice)
    assert capsys.readouterr().out.splitlines() == ["two are missing", "one is missing"]
