"""Tags, notes and trackers: their rules, and that they are no part of what a run computes."""

import importlib.util
from dataclasses import replace

import pytest
from configs import config_error, resolved

from ddp_runner.config.identity import config_hash, work_hash
from ddp_runner.config.rules import validate_trackers


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
        ("tags=[a/b]", "tags (a/b): a tag is up to 64 letters"),
        ("tags=[.]", "tags (.): a tag is up to 64 letters"),
        ("trackers=[mlflw]", "did you mean mlflow?"),
        ("+trackers.mine.path=x", "trackers.mine has no _target_, the class of the tracker"),
        ("+trackers.mine._target_=my_package.Mine", "needs my_package, which is not installed"),
        ("+trackers.mine._target_=ddp_runner.tracking.trackers.follower.Follower",
         "is not a part that a config may name"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(override: str, sentence: str) -> None:
    """Before anything starts."""
    assert sentence in config_error(override)


def test_wait_s_is_a_time() -> None:
    """It is the runner's own key, of every tracker."""
    sentence = config_error("trackers=[mlflow]", "trackers.mlflow.wait_s=0")
    assert sentence == "trackers.mlflow.wait_s (0) must be greater than 0"
    own = ("allowed_targets=[mine]", "+trackers.mine._target_=mine.Mine", "+trackers.mine.any=1")
    assert config_error(*own, "+trackers.mine.wait_s=true") == (
        "trackers.mine.wait_s (true) must be a number"
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trackers.mlflow.timeout_s=2.5", "(2.5) must be a whole number"),
        ("trackers.mlflow.timeout_s=abc", "(abc) must be a whole number"),
        ("trackers.mlflow.timeout_s=true", "(true) must be a whole number"),
        ("trackers.mlflow.experiment_name=3", "(3) must be a text"),
        ("+trackers.mlflow.foo=1", "is not a keyword of ddp_runner.tracking.trackers.mlflow.MLflow"
         "; it has experiment_name, timeout_s, tracking_uri, wait_s"),
        ("+trackers.mlflow.timeout=1", "did you mean trackers.mlflow.timeout_s?"),
        ("trackers.wandb.mode=ofline", "(ofline) must be one of null, online, offline"),
        ("trackers.wandb.timeout_s=0", "(0) must be greater than 0"),
    ],
)  # fmt: skip
def test_a_key_of_our_trackers_has_its_kind(override: str, sentence: str) -> None:
    """The tracker itself would say so minutes later, and the run would go on without it."""
    error = config_error("trackers=[mlflow,wandb]", override)
    assert error.startswith(override.lstrip("+").partition("=")[0])
    assert sentence in error


def test_mlflow_needs_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default needs more than its client. An address without http:// is a folder for it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    error = (
        "trackers.mlflow.tracking_uri, or else the variable MLFLOW_TRACKING_URI, must name a "
        "server; write trackers.mlflow.tracking_uri=http://HOST:PORT"
    )
    assert config_error("trackers=[mlflow]") == error
    uri = "trackers.mlflow.tracking_uri"
    assert config_error("trackers=[mlflow]", f"{uri}=a:secret@127.0.0.1:5000") == error
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a:secret@127.0.0.1:5000")
    validate_trackers(resolved("trackers=[mlflow]")[0])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "127.0.0.1:5000")
    assert config_error("trackers=[mlflow]") == error
    validate_trackers(resolved("trackers=[mlflow]", f"{uri}=https://mlflow.example")[0])


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_named_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its name, which W&B leaves where a run starts, is not the package."""
    find_spec = importlib.util.find_spec

    def lacking(module: str) -> object:
        return importlib.machinery.ModuleSpec(name, None) if module == name else find_spec(module)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    assert config_error(f"trackers=[{name}]") == (
        f"trackers=[{name}] needs {name}, which is not installed; pip install 'ddp-runner[{name}]'"
    )
