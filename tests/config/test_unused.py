"""Keys that a task does not read are named in one line at the start."""

from pathlib import Path

import pytest
from configs import LAPTOP, freeze, resolved

from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.plan import Invocation, plan
from ddp_runner.config.fields import walk
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS, Config
from ddp_runner.config.task_rules import _UNUSED, _UNUSED_IN_OWN_LOOP, unused_note

OWN = ("task=own_loops.run_function", "allowed_targets=[own_loops]", "world_size=1")


def notes(*words: str) -> list[str]:
    """Return the warnings of a command about keys."""
    command = parse(words)
    job = plan(compose(command), LAPTOP, Invocation(command, None, 0.0, {}))
    return [one for one in job.warnings if "task=" in one]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), None),
        (("train.deterministic=true", "batch.global_size=8", "checkpoint.every_steps=2"), None),
        (("model=toy", "optimizer=adam", "optimizer.lr=1", "trackers=[]"), None),
        (("train.clip_norm=1", "ema.decay=0.9"), "ema.decay, train.clip_norm"),
        (
            ("checkpoint.load_best=true", "checkpoint.export=[onnx]"),
            "checkpoint.export, checkpoint.load_best",
        ),
        (("early_stop={monitor:eval/loss}", "scheduler=cosine"), "early_stop, scheduler"),
        (("params.freeze=['a*']", "metrics=[top_k]"), "metrics, params.freeze"),
        (
            ("model=gpt", "dataset=text"),
            "batch.count, metrics, train.clip_norm",
        ),  # gpt.yaml sets them
    ],
)
def test_an_own_loop_names_what_the_runner_does_not_apply(
    words: tuple[str, ...], named: str | None
) -> None:
    """The function may read it; the default model's YAML was not asked for."""
    assert [one.partition("does not apply ")[2] for one in notes(*OWN, *words)] == (
        [named] if named else []
    )


def test_an_experiment_of_an_own_loop_counts(tmp_path: Path) -> None:
    """Its YAML is where such a run is described."""
    (tmp_path / "experiment").mkdir()
    keys = "ema: {decay: 0.9}\nbatch: {per_rank: 3}\n"
    text = f"# @package _global_\ntask: own_loops.run_function\n{keys}"
    (tmp_path / "experiment" / "own.yaml").write_text(text)
    (note,) = notes(f"--config-dir={tmp_path}", "experiment=own", *OWN[1:])
    assert note.endswith("the runner does not apply ema.decay")


def test_a_resume_of_an_own_loop_names_them_too(tmp_path: Path) -> None:
    """Those of this command alone."""
    config, _ = resolved(*OWN, "ema.decay=0.9")
    freeze(tmp_path, config)
    (note,) = notes(f"resume={tmp_path}", OWN[1], "train.clip_norm=1")
    assert note.endswith("the runner does not apply train.clip_norm")
    assert notes(f"resume={tmp_path}", OWN[1]) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("task=evaluate", "batch.eval_per_rank=3", "train.precision=bf16"), None),
        (("task=evaluate", "optimizer=adam", "train.epochs=3"), "optimizer, train.epochs"),
        (("task=evaluate", "params.no_decay=true"), "params.no_decay"),
        (("task=predict", "metrics=[top_k]"), "metrics"),
        (("task=predict", "inference.prompt=a", "inference.split=all"), "inference.prompt"),
        (("task=sample", "inference.prompt=a", "world_size=2"), "world_size"),
        (("task=train", "optimizer.lr=1", "inference.split=train"), "inference.split"),
    ],
)
def test_a_task_about_a_run_names_keys_of_the_training(
    words: tuple[str, ...], named: str | None, tmp_path: Path
) -> None:
    """Only those of this command: the run's own config has them all."""
    config, _ = resolved("model=toy", "ema.decay=0.9", "world_size=1")
    freeze(tmp_path, config, choices={"model": "toy", "dataset": "random"})
    task = words[0].removeprefix("task=")
    expected = [f"task={task} makes no use of {named}"] if named else []
    assert notes(f"resume={tmp_path}", *words) == expected


def test_other_tasks_name_them_as_well() -> None:
    """Measurements of the network read no model, and a check takes no step."""
    assert notes("task=collectives", "model=toy", "world_size=2") == [
        "task=collectives makes no use of model"
    ]
    assert notes("task=check", "model=toy", "world_size=2", "ema.decay=0.9") == [
        "task=check makes no use of ema.decay"
    ]
    assert notes("model=toy", "collectives.steps=3", "+loop.latent=64") == [
        "task=train makes no use of collectives.steps, loop.latent"
    ]


def test_the_table_names_keys_that_exist() -> None:
    """A key that is renamed would be left out of it without a word."""
    known = {key.name for key in walk(Config())} | {*RUNNER_KEYS, *LIST_GROUPS}
    known |= {name.partition(".")[0] for name in known}
    assert {*_UNUSED_IN_OWN_LOOP, *(one for keys in _UNUSED.values() for one in keys)} <= known
    assert unused_note("train", ["train.epochs"]) == []
