"""A run's server imports torch while its job is planned; a mistake is answered at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entry import answer_in_process

import ddp_runner.cli.app
import ddp_runner.cli.command
import ddp_runner.cli.start_runs
from ddp_runner.errors import UserError


@pytest.mark.parametrize(
    ("words", "is_early"),
    [
        ("model=toy +hydra.job.env_set.SOME=1", True),
        ("launch.nnodes=2 launch.rdzv_endpoint=here:1", False),
        ("resume=RUN", False),
        ("-m seed=1,2", False),
    ],
)
def test_the_server_of_a_run_starts_before_its_job_is_planned(
    words: str,
    is_early: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Torch's variables for several machines are known later; all others must be set by then."""
    began = list[str]()

    def planned(*_: object, **__: object) -> None:
        began.append("plan")
        raise UserError("planned", "stop here")

    monkeypatch.setattr(ddp_runner.cli.app, "stop_fork_server", lambda: began.append("stop"))
    monkeypatch.setattr(ddp_runner.cli.start_runs, "plan", planned)
    monkeypatch.setattr(ddp_runner.cli.start_runs, "run_sweep", planned)
    monkeypatch.setenv("SOME", "0")  # so that the command's value is undone
    answer = answer_in_process(
        *words.split(),
        folder=tmp_path,
        monkeypatch=monkeypatch,
        capsys=capsys,
        on_server=lambda: began.append(f"server {os.environ['SOME']}"),
    )
    assert answer.stderr == "error: planned; stop here\n"
    assert began == [*(["server 1"] if is_early else []), "plan", "stop"]


@pytest.mark.parametrize(
    ("words", "num_composed", "hint"),
    [
        ("model=toy model.hiden=3", 1, "the keys of model are"),
        ("-m model=gpt,bert model.num_head=3", 2, "did you mean model.num_heads?"),
    ],
)
def test_a_wrong_key_is_explained_with_the_config_that_hydra_had(
    words: str,
    num_composed: int,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another composition takes as long as the first; only a sweep over groups needs it."""
    composed, compose = list[object](), ddp_runner.cli.command.compose_config

    def counted(words: Any, **keywords: Any) -> Any:
        composed.append(words)
        return compose(words, **keywords)

    monkeypatch.setattr(ddp_runner.cli.command, "compose_config", counted)
    answer = answer_in_process(
        *words.split(), folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )
    assert hint in answer.stderr
    assert len(composed) == num_composed


def test_a_mistake_imports_nothing_that_starts_runs() -> None:
    """These modules are a quarter of what the command imports before its answer."""
    code = (
        "import sys, ddp_runner.cli.app; late = ('ddp_runner.launch', 'ddp_runner.sweep', "
        "'ddp_runner.cli.plan', 'importlib.metadata', 'torch'); "
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout == "[]\n"
