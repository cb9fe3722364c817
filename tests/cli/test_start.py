"""A run's server imports torch while Hydra reads the command; a mistake is answered at once."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entry import answer_in_process

import ddp_runner.cli.app
import ddp_runner.cli.command
import ddp_runner.cli.start_runs
import ddp_runner.host.processes
from ddp_runner.dist_env import RANKS


@pytest.mark.parametrize(
    ("words", "environ", "is_early"),
    [
        ("", {}, True),
        ("model=toy hydra.run.dir=run", {}, True),
        ("new my_project", {}, False),
        ("--help", {}, False),
        ("-m seed=1,2", {}, False),
        ("launch.nnodes=2", {}, False),
        ("+hydra.job.env_set.OMP_NUM_THREADS=2", {}, False),
        ("hydra/launcher=slurm experiment=scaling_study", {}, False),
        ("model=toy", {"RANK": "0"}, False),
        ("model=toy", {"COMP_LINE": "ddp-runner mod"}, False),
    ],
)
def test_a_run_starts_its_server_before_hydra_is_imported(
    words: str, environ: dict[str, str], is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that starts no ranks, or ranks with other variables, must not pay for it."""
    began = list[str]()
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        ddp_runner.host.processes, "start_fork_server", lambda: began.append("server")
    )
    app: Any = type(sys)("app")
    app.main = lambda: began.append("command")
    monkeypatch.setitem(sys.modules, "ddp_runner.cli.app", app)
    monkeypatch.setattr(importlib.import_module("ddp_runner.new"), "main", app.main)
    monkeypatch.setattr("sys.argv", ["ddp_runner", *words.split()])
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, stream, sys.__stderr__)
    runpy.run_module("ddp_runner", run_name="__main__")
    assert began == [*(["server"] if is_early else []), "command"]
    monkeypatch.setattr("sys.stdout", None)  # a closed descriptor, whose number a pipe would get
    runpy.run_module("ddp_runner", run_name="__main__")
    assert began[-1] == "command"
    assert began.count("server") == is_early


@pytest.mark.parametrize(
    ("words", "num_stops"),
    [
        ("trian.epochs=3", 1),
        ("world_size=3 batch.global_size=4", 1),
        ("world_size=3 batch.global_size=4 +hydra.job.env_set.SOME=1", 2),
    ],
)
def test_a_mistake_or_another_environment_ends_the_server(
    words: str,
    num_stops: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would import torch for seconds, and a library reads its variables when it is imported."""
    stops = list[str]()
    monkeypatch.setenv("SOME", "0")  # so that the command's value is undone
    for module in (ddp_runner.cli.app, ddp_runner.cli.start_runs):
        monkeypatch.setattr(module, "stop_fork_server", lambda: stops.append("stop"))
    answer = answer_in_process(
        *words.split(), folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )
    assert answer.exit_code == 2
    assert len(stops) == num_stops


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
