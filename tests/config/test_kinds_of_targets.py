"""Values whose kind an annotation gives, and numbers that may, or may not, be negative."""

import pytest
from configs import config_error

from ddp_runner.config.validate import _validate_keys
from ddp_runner.errors import UserError

DATASET = "ddp_runner.data.sources.torch_dataset.TorchDataset"
STEP = "torch.optim.lr_scheduler.StepLR"


def test_right_values_are_valid() -> None:
    """A value that is built is of any kind, and a mean may be negative."""
    built = {"_target_": "my_package.computed"}
    _validate_keys({"_target_": STEP, "step_size": built, "last_epoch": -1}, "scheduler")
    _validate_keys({"_target_": DATASET, "mean": -0.5}, "dataset")
    with pytest.raises(UserError, match="must be a whole number"):
        _validate_keys({"_target_": STEP, "step_size": {"a": 1}}, "scheduler")


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=momentum", "optimizer.dampening=-3"),
        ("optimizer=muon", "optimizer.ns_steps=-1"),
        ("optimizer=asgd", "optimizer.t0=-1"),
    ],
)
def test_torch_would_take_a_negative_number(words: tuple[str, str]) -> None:
    """So the rule is ours."""
    assert f"{words[1].partition('=')[0]} (-" in config_error(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("scheduler=cosine", "scheduler.warmup_steps=null"),
        ("optimizer=adamw", "optimizer.lr=null"),
        ("parallelism=ddp", "parallelism.bucket_cap_mb=null"),
    ],
)
def test_null_is_invalid_where_the_annotation_excludes_it(words: tuple[str, str]) -> None:
    """Other nulls stand for a default, or for a length that the run fills in."""
    assert f"{words[1].partition('=')[0]} is null, and " in config_error(*words)
    cosine = {"_target_": "ddp_runner.train.schedules.cosine", "total_steps": None}
    _validate_keys(cosine, "scheduler")
    _validate_keys({"_target_": "torch.optim.AdamW", "foreach": None}, "optimizer")


@pytest.mark.parametrize(("model", "dataset"), [("gpt", "text"), ("bert", "csv_text")])
def test_an_evaluation_takes_a_part_of_the_samples(model: str, dataset: str) -> None:
    """Neither all of them nor none."""
    words, key = (f"model={model}", f"dataset={dataset}"), "dataset.eval_fraction"
    assert "(1.0) must be less than 1" in config_error(*words, f"{key}=1.0")
    assert "must be greater than 0" in config_error(*words, f"{key}=0")


def test_a_server_needs_a_trainer() -> None:
    """Whatever the mode says."""
    words = ("parallelism=ps", "parallelism.needs.min_ranks=1", "world_size=1")
    assert "write world_size=2" in config_error(*words)


@pytest.mark.parametrize(
    "word", ["tags=[mlflow.runName]", "tags=[ddp_runner.run]", "+model.blocks=[1]"]
)
def test_what_would_fail_later_is_invalid(word: str) -> None:
    """In one line, before a rank starts."""
    assert "must be a text" in config_error(word) or "must not begin with" in config_error(word)
