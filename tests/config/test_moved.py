"""A run that an earlier version froze is resumed: its names of parts and keys are translated."""

import shutil
from pathlib import Path

import pytest
import yaml
from commands import run_command
from configs import LAPTOP, compose_raw, resolved
from run_folders import record

from ddp_runner.checkpoint.store import load_checkpoint, save_checkpoint
from ddp_runner.cli.compose import register
from ddp_runner.cli.resume import with_resumed
from ddp_runner.config.load import to_config
from ddp_runner.config.moved import present_name, with_moved_names
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.tracking.run_dir import RunDir

# For each command line what version 0.1.0 froze in place of what is frozen now.
EARLIER = {
    "model=convnet parallelism=single": {
        "model": {"loss": "ddp_runner.losses.cross_entropy"},
        "dataset": {"_target_": "ddp_runner.data.digits.Digits"},
        "scheduler": {"_target_": "ddp_runner.schedules.constant"},
        "parallelism": {"devices_per_rank": 1, "max_ranks": 1},
    },
    "model=mnist_net dataset=fake_images parallelism=ps world_size=3 batch.per_rank=4": {
        "model": {"loss": "ddp_runner.losses.nll"},
        "dataset": {"_target_": "ddp_runner.data.fake_images.FakeImages"},
        "parallelism": {
            "_target_": "ddp_runner.parallelism.ps.ParameterServer",
            "devices_per_rank": 1,
            "num_servers": 1,
        },
    },
    "model=toy_mp parallelism=ddp_mp": {
        "model": {"loss": "ddp_runner.losses.mse"},
        "dataset": {"_target_": "ddp_runner.data.random.RandomRegression"},
        "parallelism": {"devices_per_rank": 2},
    },
}


def resumed(run_dir: Path) -> Config:
    """Return what a command that resumes a run resolves to."""
    register()
    overrides = [f"resume={run_dir}"]
    return resolve(to_config(with_resumed(compose_raw(*overrides), overrides)), hardware=LAPTOP)[0]


@pytest.mark.parametrize("line", EARLIER)
def test_an_earlier_config_resolves_to_what_it_did(line: str, tmp_path: Path) -> None:
    """Every group is the one that is frozen now, but for defaults that needs leave out."""
    config, _ = resolved(*line.split())
    RunDir(tmp_path).freeze(config, overrides=(), choices={})
    now = resumed(tmp_path)
    path = tmp_path / ".hydra" / "config.yaml"
    frozen = yaml.safe_load(path.read_text())
    for group, keys in EARLIER[line].items():
        frozen[group] |= keys
        frozen[group].pop("needs", None)
    frozen["sweep"]["skip_refused"] = not frozen["sweep"].pop("skip_invalid")
    path.write_text(yaml.safe_dump(frozen, sort_keys=False))

    before = resumed(tmp_path)
    assert before.sweep.skip_invalid
    for group in ("model", "dataset", "optimizer", "scheduler", "batch", "train"):
        assert getattr(before, group) == getattr(now, group)
    needs = before.parallelism.pop("needs")
    assert {"devices_per_rank": 1} | now.parallelism.pop("needs") == needs
    assert before.parallelism == now.parallelism


def test_other_names_and_values_stay() -> None:
    """A part of the user's own, a number, and what is nested in lists."""
    assert present_name("my_package.losses.focal") == "my_package.losses.focal"
    assert present_name(3) == 3
    mine = {"_target_": "mine.Mode", "max_ranks": 2, "inner": [{"a": 1}, 2.5, None]}
    assert with_moved_names({"parallelism": mine}) == {"parallelism": mine}


@pytest.mark.parametrize(
    "name", ["digits.Digits", "fake_images.FakeImages", "random.RandomRegression"]
)
def test_a_source_has_moved_twice(name: str) -> None:
    """Into its own module, and then into the one of all sources without files."""
    present = f"ddp_runner.data.sources.offline.{name.partition('.')[2]}"
    for folder in ("ddp_runner.data", "ddp_runner.data.sources"):
        assert present_name(f"{folder}.{name}") == present


def test_an_earlier_run_goes_on(tmp_path: Path) -> None:
    """From its frozen config and from its checkpoint, which names the loss as well."""
    toy = ("model=toy", "parallelism=single", "train.num_threads=1", "train.max_steps=3")
    assert run_command(*toy, "hydra.run.dir=run", folder=tmp_path).exit_code == 0
    frozen, saved = tmp_path / "run" / ".hydra" / "config.yaml", tmp_path / "run" / "checkpoints"
    text = frozen.read_text()
    for now, before in {
        "  step: ddp_runner.train.step.supervised\n": "",
        "  count: samples\n": "",
        "ddp_runner.train.": "ddp_runner.",
        "ddp_runner.data.sources.offline.": "ddp_runner.data.random.",
        "skip_invalid": "skip_refused",
        "  needs:\n    max_ranks: 1\n": "  devices_per_rank: 1\n  max_ranks: 1\n",
    }.items():
        assert now in text
        text = text.replace(now, before)
    frozen.write_text(text)
    state = load_checkpoint(saved / "step-00000003")
    assert state["made_of"]["model.loss"] == "ddp_runner.train.losses.mse"
    state["made_of"]["model.loss"] = "ddp_runner.losses.mse"
    shutil.rmtree(saved)
    save_checkpoint(saved, state, step=3, metrics={}, config=CheckpointConfig(), log=pytest.fail)
    end = run_command("resume=run", "train.max_steps=5", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(tmp_path / "run")["step"] == 5
