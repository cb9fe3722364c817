"""A fixture of sweeps that start no job."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from commands import CommandResult
from entry import answer_in_process


@pytest.fixture
def answer_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """Return a function that gives a command line to the entry in this process."""
    return partial(answer_in_process, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
