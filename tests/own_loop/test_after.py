"""What can be done with the model that a loop of the user's own has exported."""

from pathlib import Path

import pytest
import torch
from commands import RUNNER, TORCHRUN, error_line, run_command
from own_loops import run_function
from run_folders import record
from safetensors.torch import load_file

import ddp_runner
from ddp_runner.errors import UserError

OF_THE_CONFIG = """
import torch

def train(run):
    model = run.model(num_classes=7)  # not what the config says
    with torch.no_grad():
        next(model.parameters()).fill_(0.5)
    run.restore()
    run.log({"loss": 1.0}, step=3)
    run.export(run.wrap(model))
"""
OF_ITS_OWN = """
import torch

def train(run):
    run.restore()
    run.export(torch.nn.Linear(2, 2))
"""
KEYS = ("model=mnist_net", "train.num_threads=1")


@pytest.mark.full
def test_a_model_of_the_config_is_used_as_that_of_any_run(tmp_path: Path) -> None:
    """Loaded, predicted with, exported, and trained on; its task is not called again."""
    end = run_function(OF_THE_CONFIG, *KEYS, folder=tmp_path)
    assert end.exit_code == 0, end.stderr
    run = end.run_dir
    assert record(run)["model_arguments"] == {"num_classes": 7}
    weights = load_file(run / "model.safetensors")
    model = ddp_runner.load(run).state_dict()
    assert all(torch.equal(model[key], weights[key]) for key in weights)
    predicted = run_command(
        "task=predict", f"resume={run}", "hydra.run.dir=predicted", folder=tmp_path
    )
    assert predicted.exit_code == 0, predicted.stderr
    header = (tmp_path / "predicted" / "predictions.csv").read_text().splitlines()[0]
    assert header.endswith("output_6")
    begun = ("train.max_steps=1", "optimizer.lr=1e-30", "hydra.run.dir=begun")
    on = run_command(*KEYS, f"model.weights={run}", "dataset=fake_images",
                     "dataset.num_classes=7", *begun, folder=tmp_path)  # fmt: skip
    assert on.exit_code == 0, on.stderr
    ours = load_file(tmp_path / "begun" / "model.safetensors")
    assert all(torch.equal(ours[key], weights[key]) for key in weights)


@pytest.mark.full
def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    """A model that the loop made itself, and a loop that exported nothing."""
    own = run_function(OF_ITS_OWN, folder=tmp_path / "own").run_dir
    command = ("task=predict", f"resume={own}")
    line = error_line(run_command(*command, folder=tmp_path))
    assert "built its model in its own loop" in line
    assert line.endswith("let the loop take it from run.model()")
    with pytest.raises(UserError, match="built its model in its own loop"):
        ddp_runner.load(own)
    source = OF_THE_CONFIG.replace("run.export(run.wrap(model))", "run.wrap(model)")
    nothing = run_function(source, *KEYS, folder=tmp_path / "nothing").run_dir
    (nothing / "checkpoints").mkdir(exist_ok=True)
    line = error_line(run_command(*KEYS, f"model.weights={nothing}", folder=tmp_path))
    assert line.endswith("with these weights; call run.export in its loop")


UNSAVED = """
from pathlib import Path

def train(run, *, steps=2):
    step = run.restore()
    while step < steps:
        step += 1
        run.log({"loss": 1.0 / step}, step=step)
        if run.should_stop(step):
            return
    Path("calls").open("a").write("called\\n")
"""


@pytest.mark.full
@pytest.mark.parametrize("program", [RUNNER, pytest.param(TORCHRUN, marks=pytest.mark.full)])
def test_a_loop_that_completed_without_a_checkpoint_is_not_called_again(
    program: tuple[str, ...], tmp_path: Path
) -> None:
    """Its results would be replaced; with other keys there is nothing to go on from."""
    run = run_function(UNSAVED, "+loop.steps=2", "world_size=1", folder=tmp_path).run_dir
    before = {path: path.read_bytes() for path in (run / "run.json", run / "metrics.jsonl")}
    words = ("resume=last", "allowed_targets=[mine]")
    options = {"folder": tmp_path, "environ": {"PYTHONPATH": str(tmp_path)}}
    module = () if program == RUNNER else ("-m", "ddp_runner")
    again = run_command(*module, *words, program=program, **options)
    assert again.exit_code == 0, again.stderr
    assert again.stdout.count(" has completed without a checkpoint: nothing is left to do") == 1
    line = error_line(run_command(*words, "loop.steps=4", **options))
    assert "completed without a checkpoint" in line
    assert line.endswith("with other keys; start a new run")
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "calls").read_text() == "called\n"
