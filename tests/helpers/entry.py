"""Give a command line to the entry in the test's own process, if it starts no run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CommandResult
from hydra.core.global_hydra import GlobalHydra

import ddp_runner.cli.app
import ddp_runner.cli.start_runs
import ddp_runner.sweep.local


def answer_in_process(
    *args: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    on_server: Callable[[], object] = lambda: None,
) -> CommandResult:
    """Return the answer to a command line that is given in `folder`; fail if it starts a run.

    `on_server` is called in place of the fork server's start.
    """

    def started(*_: object) -> None:
        raise AssertionError("it was not rejected")

    for module in (ddp_runner.cli.app, ddp_runner.cli.start_runs, ddp_runner.sweep.local):
        monkeypatch.setattr(module, "start_fork_server", on_server)
    for module in (ddp_runner.cli.start_runs, ddp_runner.sweep.local):
        monkeypatch.setattr(module, "launch", started)
    monkeypatch.chdir(folder)
    GlobalHydra.instance().clear()
    monkeypatch.setattr("sys.argv", ["ddp_runner", *args])
    with pytest.raises(SystemExit) as end:
        ddp_runner.cli.app.main()
    code = end.value.code
    return CommandResult(code if isinstance(code, int) else 0, *capsys.readouterr(), folder)
