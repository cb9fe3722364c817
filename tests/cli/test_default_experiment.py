"""A user's experiment/default.yaml is what a command without experiment=NAME trains."""

from pathlib import Path
from typing import Any

import pytest
from commands import error_line, run_command
from configs import resolved

from ddp_runner.cli.command_line import CommandLine, parse
from ddp_runner.cli.compose import compose
from ddp_runner.tracking.run_dir import RunDir

DEFAULT = """# @package _global_
defaults:
  - override /model: toy
train: {epochs: 3}
seed: 7
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The option for a config folder with a default experiment."""
    path = tmp_path / "conf" / "experiment" / "default.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(DEFAULT)
    return f"--config-dir={tmp_path / 'conf'}"


def composed(*arguments: str) -> tuple[Any, CommandLine]:
    """Return what a command line composes, and the command line as it was read."""
    command = parse(arguments)
    return compose(command), command


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("toy", 3, 7)),
        (("train.epochs=5",), ("toy", 5, 7)),
        (("model=convnet",), ("convnet", 3, 7)),
        (("experiment=best_by_f1",), ("convnet", 10, 0)),
        (("resume=auto",), ("toy", 3, 7)),
        (("-m", "seed=1,2"), ("toy", 3, 7)),
        (("-m", "experiment=best_by_f1,toy_ddp"), ("convnet", 10, 0)),
    ],
)
def test_the_default_experiment_is_chosen_unless_another_is(
    own: str, overrides: tuple[str, ...], expected: tuple[str, int, int]
) -> None:
    """What the command line says wins over it, and what it implies is not taken for written."""
    config, command = composed(*overrides, own)
    assert (config.model["name"], config.train.epochs, config.seed) == expected
    assert "experiment=default" not in command.written


def test_a_folder_without_one_changes_nothing(tmp_path: Path) -> None:
    """Nor does a command without a folder."""
    assert parse([f"--config-dir={tmp_path}"]).implied == ()
    assert parse([]).implied == ()


def test_a_resumed_run_keeps_its_own_config(own: str, tmp_path: Path) -> None:
    """The default experiment would set keys that the run does not have."""
    frozen, _ = resolved("model=convnet", "train.epochs=2", "seed=4")
    (tmp_path / "run").mkdir()
    RunDir(tmp_path / "run").freeze(frozen, overrides=(), choices={})
    assert "experiment=default" not in parse([f"resume={tmp_path / 'run'}", own]).implied


@pytest.mark.parametrize("extra", [(), ("-m", "sweep.dry_run=true")])
def test_a_mistyped_experiment_is_an_error(
    own: str, extra: tuple[str, ...], tmp_path: Path
) -> None:
    """With a default experiment and without one."""
    for folder in ((own,), ()):
        name = "digts,toy_ddp" if extra else "digts"
        end = run_command(*folder, f"experiment={name}", *extra, folder=tmp_path)
        assert "experiment=digts does not exist" in error_line(end)
