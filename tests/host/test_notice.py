"""A line about a long wait: printed once, and only if the wait is long."""

import time

import pytest
from commands import wait_for

from ddp_runner.host import notice
from ddp_runner.host.notice import notice_if_slow


@pytest.mark.parametrize(
    ("patience_s", "enabled", "printed"),
    [(0.01, True, "waiting\n"), (60.0, True, ""), (0.01, False, "")],
)
def test_a_notice_is_printed_if_the_wait_is_long(
    patience_s: float,
    enabled: bool,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And its thread is gone after the block."""
    monkeypatch.setattr(notice, "PATIENCE_S", patience_s)
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return shown == printed

    with notice_if_slow("waiting", enabled=enabled):
        if printed:
            wait_for(is_shown)
        else:
            time.sleep(0.2)
    assert shown + capsys.readouterr().out == printed
