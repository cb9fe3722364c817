"""A line about a long wait: printed once, and only if the wait is long."""

import time

import pytest

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
    with notice_if_slow("waiting", enabled=enabled):
        time.sleep(0.2)
    assert capsys.readouterr().out == printed
