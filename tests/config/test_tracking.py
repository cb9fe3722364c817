"""Tags, notes and trackers: their rules, and that they are no part of what a run computes."""

import importlib.util
from dataclasses import replace

import pytest
from configs import config_error, resolved

from ddp_runner.config.schema import config_hash, work_hash


def test_tags_notes_and_trackers_change_no_identity() -> None:
    """So a run that is resumed may get others, and runs of one setting stay one setting."""
    plain, _ = resolved("model=toy")
    keys = ("tags=[a,b-1]", "notes='why, and how'", "trackers=[mlflow,wandb]")
    tracked, _ = resolved("model=toy", *keys, "trackers.mlflow.experiment_name=other")
    assert (tracked.tags, tracked.notes) == (["a", "b-1"], "why, and how")
    assert list(tracked.trackers) == ["mlflow", "wandb"]
    assert config_hash(tracked) == config_hash(plain)
    assert work_hash(tracked) == work_hash(plain)
    assert config_hash(replace(plain, seed=1)) != config_hash(plain)


def test_a_number_is_a_tag() -> None:
    """YAML reads it as one."""
    config, _ = resolved("tags=[2026]")
    assert config.tags == ["2026"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("tags=['']", "tags (): a tag is up to 64 letters"),
        ("tags=['a,b']", "tags (a,b): a tag is up to 64 letters"),
        (f"tags=[{'x' * 65}]", "a tag is up to 64 letters"),
        ("tags=[a,a]", "tags (a, a) names one twice"),
        ("trackers=[mlflw]", "did you mean mlflow?"),
        ("+trackers.mine.path=x", "trackers.mine has no _target_, the class of the tracker"),
        ("+trackers.mine._target_=my_package.Mine", "add allowed_targets=[my_package]"),
        ("+trackers.mine._target_=ddp_runner.tracking.trackers.sender.TrackerProcess",
         "is not a part that a config may name"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(override: str, sentence: str) -> None:
    """Before anything starts."""
    assert sentence in config_error(override)


def test_wait_s_is_a_time() -> None:
    """It is the runner's own key."""
    sentence = config_error("trackers=[mlflow]", "trackers.mlflow.wait_s=0")
    assert sentence.startswith("trackers.mlflow.wait_s (0) must be a number of seconds")


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_named_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its name, which W&B leaves where a run starts, is not the package."""
    find_spec = importlib.util.find_spec

    def lacking(module: str) -> object:
        return importlib.machinery.ModuleSpec(name, None) if module == name else find_spec(module)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    assert config_error(f"trackers=[{name}]") == (
        f"trackers=[{name}] needs {name}; install it with pip install 'ddp-runner[{name}]'"
    )
