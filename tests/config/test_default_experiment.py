"""A user's experiment/default.yaml is what a command without experiment=NAME trains."""

from pathlib import Path

import pytest
from configs import resolved
from pages import ROOT

from ddp_runner.tracking.run_dir import RunDir


@pytest.fixture
def own_conf(tmp_path: Path) -> Path:
    """A config folder with a default experiment."""
    path = tmp_path / "conf" / "experiment" / "default.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "# @package _global_\ndefaults:\n  - override /model: toy\ntrain: {epochs: 3}\nseed: 7\n"
    )
    return tmp_path / "conf"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("toy", 3, 7)),
        (("train.epochs=5",), ("toy", 5, 7)),
        (("model=convnet",), ("convnet", 3, 7)),
        (("experiment=best_by_f1",), ("convnet", 10, 0)),
    ],
)
def test_the_default_experiment_is_chosen_unless_another_is(
    own_conf: Path, overrides: tuple[str, ...], expected: tuple[str, int, int]
) -> None:
    """What the command line says wins over it."""
    config, _ = resolved(*overrides, folders=[own_conf])
    assert (config.model["name"], config.train.epochs, config.seed) == expected


def test_a_project_without_one_trains_as_before() -> None:
    """And so does a command without a folder."""
    assert not (ROOT / "conf" / "experiment" / "default.yaml").exists()
    config, _ = resolved()
    assert (config.model["name"], config.train.epochs, config.seed) == ("convnet", 10, 0)


def test_a_resumed_run_keeps_its_own_config(own_conf: Path, tmp_path: Path) -> None:
    """The default experiment is no key that the command gives."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    frozen, _ = resolved("model=convnet", "train.epochs=2", "seed=4")
    RunDir(run_dir).freeze(frozen, overrides=(), choices={})
    config, _ = resolved(f"resume={run_dir}", folders=[own_conf])
    assert (config.model["name"], config.train.epochs, config.seed) == ("convnet", 2, 4)
