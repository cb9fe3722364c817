"""A run's server imports torch while Hydra reads the command; a mistake is answered at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entry import answer_in_process

import ddp_runner.cli.app
import ddp_runner.cli.command
import ddp_runner.cli.start_runs
from ddp_runner.cli.mistakes import validate_words
from ddp_runner.dist_env import RANKS
from ddp_runner.errors import UserError


@pytest.mark.parametrize(
    ("words", "environ", "is_early"),
    [
        ("", {}, True),
        ("model=toy hydra.run.dir=run", {}, True),
        ("--help", {}, False),
        ("-m seed=1,2", {}, False),
        ("resume=RUN", {}, False),
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
    app = ddp_runner.cli.app
    monkeypatch.setattr(app, "keep_streams", lambda _: None)
    monkeypatch.setattr(app, "start_fork_server", lambda: began.append("server"))
    monkeypatch.setattr(app, "run", lambda *_, **__: began.append("command"))
    with pytest.raises(SystemExit):
        app.main(words.split())
    assert began == [*(["server"] if is_early else []), "command"]


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        ("trian.epochs=3", ["stop"]),
        ("model=gppt", ["stop"]),
        ("model.hiden=3", ["server", "stop"]),
        ("model=toy", ["server", "plan", "stop"]),
        ("model=toy +hydra.job.env_set.SOME=1", ["stop", "plan", "stop"]),
    ],
)
def test_a_mistake_or_another_environment_ends_the_server(
    words: str,
    begun: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would import torch for seconds, and a library reads its variables when it is imported."""
    began = list[str]()

    def planned(*_: object, **__: object) -> None:
        began.append("plan")
        raise UserError("planned", "stop here")

    monkeypatch.setenv("SOME", "0")  # so that the command's value is undone
    monkeypatch.setattr(ddp_runner.cli.start_runs, "plan", planned)
    for module in (ddp_runner.cli.app, ddp_runner.cli.start_runs):
        monkeypatch.setattr(module, "stop_fork_server", lambda: began.append("stop"))
    answer = answer_in_process(
        *words.split(),
        folder=tmp_path,
        monkeypatch=monkeypatch,
        capsys=capsys,
        on_server=lambda: began.append("server"),
    )
    assert answer.exit_code == 2
    assert began == begun


def test_what_is_told_without_hydra_is_what_hydra_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first answer is a shortcut, and a config of the user's own takes the long way."""
    words = "trian.epochs=3 train.epoch=3 world_sise=2 model=gppt metrics=acuracy lr=1 train.lr=1"
    for word in (*words.split(), "weights=1", "hydra=1"):
        answers = list[str]()
        for shortcut in (validate_words, lambda _: None):
            monkeypatch.setattr(ddp_runner.cli.app, "validate_words", shortcut)
            answer = answer_in_process(
                "-m", word, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys
            )
            answers.append(answer.stderr)
        assert answers[0] == answers[1] != ""
        validate_words([f"--config-dir={tmp_path}", word])
        validate_words([f"++hydra.searchpath=[{tmp_path}]", word])


@pytest.mark.parametrize(
    "words",
    [
        "model=toy train.step._target_=a.b user.x=1 loop.y=2 metrics.acc.k=1 seed.x=1 backend=gloo",
        "model=null hydra.run.dir=x optimizer.lr=3 +trian.x=1 ~model parallelism.x=1 train=3 =2 x",
    ],
)
def test_what_may_be_right_is_left_to_hydra(words: str) -> None:
    """Among them are mistakes: Hydra knows them."""
    validate_words(words.split())


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
    """Hydra alone takes twice as long as the rest of an answer."""
    code = (
        "import sys, ddp_runner.cli.app; late = ('ddp_runner.launch', 'ddp_runner.sweep', "
        "'ddp_runner.cli.plan', 'importlib.metadata', 'hydra', 'omegaconf', 'torch'); "
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout == "[]\n"
