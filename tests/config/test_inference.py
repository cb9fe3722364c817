"""The rules of the tasks that take the model of a run, before anything starts."""

from pathlib import Path

import pytest
from configs import config_error, freeze, resolved

from ddp_runner.host.hardware import Hardware
from ddp_runner.tracking.run_record import write_run_record

GPUS = Hardware(num_gpus=4, num_cores=16)


def frozen_run(folder: Path, *overrides: str, hardware: Hardware = GPUS) -> Path:
    """Return a folder with a run's frozen config."""
    config, _ = resolved(*overrides, hardware=hardware)
    (folder / "run").mkdir()
    freeze(folder / "run", config, overrides=overrides)
    return folder / "run"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task=evaluate",), "task=evaluate takes the model of a run; write resume=RUN"),
        (("task=predict", "resume=auto"), "task=predict takes the model of a run"),
        (("task=evalute",), "did you mean evaluate?"),
        (("checkpoint.export=[tflite]",), "must be among onnx, torch_export"),
        (("inference.split=test",), "inference.split (test) must be one of eval, train, all"),
    ],
)
def test_mistakes_are_named(overrides: tuple[str, ...], message: str) -> None:
    """Each answer is one line with the fix."""
    assert message in config_error(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task=export",), "write checkpoint.export=[onnx]"),
        (("task=predict", "inference.weights=worst"), "must be best, last, or the step"),
        (("task=predict", "inference.weights=-1"), "must be best, last, or the step"),
        (("task=predict", "inference.run=elsewhere"), "write resume=RUN"),
    ],
)
def test_mistakes_with_a_run_are_named(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """The same for keys that need a run."""
    run = frozen_run(tmp_path, "model=toy")
    assert message in config_error(f"resume={run}", *overrides)


def test_the_config_is_that_of_the_run_with_this_command_on_top(tmp_path: Path) -> None:
    """The run's model and data; the samples of a forward stay as many."""
    run = frozen_run(
        tmp_path,
        "model=toy",
        "batch.global_size=64",
        "world_size=2",
        "name=mine",
        hardware=Hardware(num_gpus=0, num_cores=8),
    )
    config, _ = resolved(f"resume={run}", "task=evaluate", "world_size=3", "seed=5")
    assert (config.task, config.resume, config.inference.run) == ("evaluate", None, str(run))
    assert (config.world_size, config.batch.eval_per_rank) == (3, 32)
    assert (config.model["name"], config.seed, config.name) == ("toy", 5, None)


@pytest.mark.parametrize(("task", "name"), [("check", "check"), ("collectives", "collectives")])
def test_a_run_that_trained_nothing_has_no_model(task: str, name: str, tmp_path: Path) -> None:
    """Of task=check there is nothing to evaluate."""
    run = frozen_run(tmp_path, f"task={task}", "world_size=2")
    assert f"is a run of task={name}" in config_error(f"resume={run}", "task=evaluate")


def test_a_run_of_gpus_is_evaluated_where_there_are_none(tmp_path: Path) -> None:
    """With what this machine has, and a sentence about it."""
    run = frozen_run(tmp_path, "model=convnet", "world_size=4")
    laptop = Hardware(num_gpus=0, num_cores=2)
    config, notes = resolved(f"resume={run}", "task=evaluate", hardware=laptop)
    assert (config.backend.name, config.backend.device, config.world_size) == ("gloo", "cpu", 2)
    assert "the run had 4 GPUs (cuda) and this machine shows none" in notes[0]
    other = Hardware(num_gpus=4, num_cores=8, kind="xpu", backend="xccl")
    config, notes = resolved(f"resume={run}", "task=evaluate", hardware=other)
    assert (config.backend.name, config.backend.device, config.world_size) == ("xccl", "xpu", 4)
    assert "the run had 4 GPUs (cuda) and this machine shows 4 (xpu)" in notes[0]
    config, notes = resolved(f"resume={run}", "task=evaluate", hardware=GPUS)
    assert (config.backend.name, config.world_size, notes) == ("nccl", 4, [])


def test_how_a_run_was_launched_does_not_count(tmp_path: Path) -> None:
    """A run of several machines is evaluated on one, with as many ranks as fit it."""
    run = frozen_run(
        tmp_path,
        *("model=toy", "launch.nnodes=2", "launch.rdzv_endpoint=host:29400", "world_size=8"),
        hardware=Hardware(num_gpus=0, num_cores=4),
    )
    write_run_record(run, num_nodes=2)
    config, _ = resolved(f"resume={run}", "task=evaluate")
    assert (config.launch.nnodes, config.world_size) == (1, 2)


def test_more_metrics_stand_beside_those_of_the_run(tmp_path: Path) -> None:
    """What the training monitored is still there; without it, nothing is monitored here."""
    run = frozen_run(
        tmp_path,
        *("model=convnet", "metrics=[pixel_accuracy]", "checkpoint.monitor=eval/pixel_accuracy"),
    )
    config, _ = resolved(f"resume={run}", "task=evaluate", "metrics=[top_k]")
    assert list(config.metrics) == ["pixel_accuracy", "top_k"]


def test_weights_that_the_training_began_with_may_be_gone(tmp_path: Path) -> None:
    """They are in the run's own weights."""
    run = frozen_run(tmp_path, "model=toy", "model.weights=gone")
    assert resolved(f"resume={run}", "task=evaluate")[0].model["weights"] is None


def test_an_evaluation_cannot_be_trained_on(tmp_path: Path) -> None:
    """Its folder has no checkpoints; the run that it was about has."""
    run = frozen_run(tmp_path, "model=toy")
    config, _ = resolved(f"resume={run}", "task=evaluate")
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    freeze(evaluation, config)
    error = config_error(f"resume={evaluation}", "task=train")
    assert f"which has nothing to train; name the run that it used: resume={run}" in error
