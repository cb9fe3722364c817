"""A loop of the user's own, through the real command: the GAN of examples/, and small functions."""

import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import CommandResult, background, run_command, wait_for, wait_for_end
from injection import At, Fault, inject, kill_tree, send_signal
from own_loops import run_function
from run_folders import (
    checkpoint_dir,
    checkpoint_steps,
    last_step,
    metrics,
    rank_log,
    record,
    reproducible_metrics,
    run_dirs,
    tensorboard_scalars,
    tensors_in,
)
from safetensors.torch import load_file

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
HERE = {"PYTHONPATH": str(ROOT)}  # where examples.gan is found
SMALL = ("loop.width=16", "loop.latent=16", "loop.epochs=2", "train.num_threads=1")
GAN = (f"--config-dir={ROOT}/examples/gan/conf", "experiment=gan", *SMALL)
COMPARE = (sys.executable, "-m", "ddp_runner.compare")
STEPS = 46  # two epochs of 1437 digits
CHOICES = ("world_size=2", "checkpoint.every_steps=7", "checkpoint.keep=99")


def gan(*args: str, folder: Path, **options: object) -> CommandResult:
    """Run the GAN to its end."""
    return run_command(*GAN, *args, folder=folder, environ=HERE, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """Return an uninterrupted run of the GAN on two ranks."""
    result = gan(*CHOICES, folder=tmp_path_factory.mktemp("whole"))
    assert result.exit_code == 0, result.stderr
    return result


def test_a_gan_leaves_what_every_run_leaves(whole: CommandResult) -> None:
    """Status, metrics, TensorBoard, pictures, checkpoints and weights, by the names of its own."""
    run = whole.run_dir
    fields = record(run)
    assert run.parent.name == "gan"
    assert (fields["status"], fields["step"], fields["epoch"]) == ("completed", STEPS, 2)
    assert fields["uses"] == ["dataset"]
    assert fields["startup_s"] > 0
    lines = metrics(run)
    distances = [line["eval/pixel_distance"] for line in lines if "eval/pixel_distance" in line]
    assert distances[1] < distances[0]
    assert [line["step"] for line in lines if "d/loss" in line] == [10, 20, 30, 40]
    assert [line["epoch"] for line in lines] == [1, 1, 1, 2, 2, 2]
    assert lines[0]["perf/samples_per_s"] > 0
    shown = tensorboard_scalars(run)
    assert shown[(40, "g/loss")] == pytest.approx(lines[-2]["g/loss"])
    pictures = [path.name for path in sorted((run / "images" / "samples").iterdir())]
    assert pictures == ["step-00000023.png", "step-00000046.png"]
    assert checkpoint_steps(run) == [7, 14, 21, 23, 28, 35, 42, 46]
    state = torch.load(checkpoint_dir(run, STEPS) / "state.pt", weights_only=True)
    exported = load_file(run / "model.safetensors")
    assert all(
        torch.equal(exported[key], one) for key, one in state["objects"]["generator"].items()
    )
    for line in (lines[0], lines[-1]):
        name = next(key for key in line if key.startswith(("d/", "eval/")))
        assert f"step {line['step']}  {name} {line[name]:.4f}" in whole.stdout


def test_a_killed_gan_resumes_bit_for_bit(whole: CommandResult, tmp_path: Path) -> None:
    """All processes are killed by SIGKILL amid the second epoch."""
    fault = Fault(kill_tree, At(rank=0, step=30, of="own step"))
    killed = gan(*CHOICES, folder=tmp_path, prepare=inject(fault))
    assert killed.exit_code == -signal.SIGKILL
    (run,) = run_dirs(tmp_path)
    saved = checkpoint_steps(run)[-1]
    assert 23 <= saved <= 28
    again = run_command(
        f"resume={run}", "allowed_targets=[examples]", folder=tmp_path, environ=HERE
    )
    assert again.exit_code == 0, again.stderr
    assert f"step-{saved:08d}, step {saved}" in again.stdout
    assert_same(run, whole.run_dir)


@pytest.mark.slow  # what it goes on with is shown above; how ranks start anew knows no task
def test_a_restarted_gan_equals_an_undisturbed_one(whole: CommandResult, tmp_path: Path) -> None:
    """A rank was killed; all ranks go on from the last checkpoint, in new processes."""
    fault = Fault(partial(send_signal, signal.SIGKILL), At(rank=1, step=30, of="own step"))
    restarted = gan(*CHOICES, "launch.max_restarts=1", folder=tmp_path, prepare=inject(fault))
    assert restarted.exit_code == 0, restarted.stderr
    assert "restart 1 of 1: rank 1 was killed by SIGKILL" in restarted.stdout
    assert_same(restarted.run_dir, whole.run_dir)


def assert_same(run: Path, other: Path) -> None:
    """Compare what two runs have saved and logged, bit for bit."""
    states = [
        torch.load(checkpoint_dir(one, STEPS) / "state.pt", weights_only=True)
        for one in (run, other)
    ]
    tensors = [dict(tensors_in(state["objects"])) for state in states]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    assert states[0]["objects"]["loader"] == states[1]["objects"]["loader"]
    assert reproducible_metrics(run) == reproducible_metrics(other)
    pictures = [sorted((one / "images").rglob("*.png")) for one in (run, other)]
    assert pictures[0]
    assert [one.read_bytes() for one in pictures[0]] == [one.read_bytes() for one in pictures[1]]


@pytest.mark.slow
def test_a_stopped_gan_goes_on(tmp_path: Path) -> None:
    """SIGTERM: the step is finished and saved; the same command again continues the run."""
    command = (*GAN, "world_size=2", "resume=auto")
    with background(*command, folder=tmp_path, environ=HERE) as process:
        wait_for(lambda: last_step(tmp_path) >= 10)
        process.send_signal(signal.SIGTERM)
        stopped = wait_for_end(process, tmp_path)
    assert stopped.exit_code == 128 + signal.SIGTERM
    run = stopped.run_dir
    fields = record(run)
    assert (fields["status"], [fields["step"]]) == ("preempted", checkpoint_steps(run)[-1:])
    assert f'resume={run} "allowed_targets=[examples]"' in stopped.stdout
    again = run_command(*command, folder=tmp_path, environ=HERE)
    assert again.exit_code == 0, again.stderr
    assert f"step {fields['step']}" in rank_log(run).partition("resumed from")[2]
    assert (record(run)["status"], record(run)["step"]) == ("completed", STEPS)


@pytest.mark.slow
def test_a_swept_gan_is_compared_by_its_own_metrics(tmp_path: Path) -> None:
    """Without a train/loss: by what the function has logged, and without groups that it left."""
    swept = gan("-m", "world_size=1,2", "loop.epochs=1", "hydra.sweep.dir=sweep", folder=tmp_path)
    assert swept.exit_code == 0, swept.stderr
    assert "eval/pixel_distance 0." in swept.stdout.splitlines()[-2]
    table = run_command("sweep", "--best", "g/loss", folder=tmp_path, program=COMPARE)
    assert table.exit_code == 0, table.stderr
    head = table.stdout.splitlines()[0]
    assert "all with task examples.gan.dcgan.train, dataset digits, parallelism ddp" in head
    assert "model" not in head
    assert "optimizer" not in table.stdout
    for column in ("world_size", "samples/s", "strong speedup", "d/loss", "eval/pixel_distance"):
        assert column in table.stdout
    assert "best g/loss" in table.stdout


def test_a_mistake_in_the_function_is_one_line_with_its_place(tmp_path: Path) -> None:
    """The exit code is a crash's, and the line names the user's file, not torch's."""
    source = """
    import torch

    def mix(a, b):
        return torch.cat([a, b])

    def train(run):
        run.restore()
        run.log({"loss": 1.0}, step=1)
        mix(torch.zeros(2, 3), torch.zeros(2, 4))
    """
    result = run_function(source, folder=tmp_path)
    assert result.exit_code == 1
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("error: ")]
    assert "raised RuntimeError: Sizes of tensors must match" in line
    assert "(mine.py, line 5); see " in line
    assert record(result.run_dir)["status"] == "failed"


def test_a_loop_that_never_asks_still_ends(tmp_path: Path) -> None:
    """After launch.shutdown_timeout_s, without a checkpoint."""
    (tmp_path / "mine.py").write_text(
        "import time\n\ndef train(run):\n    run.restore()\n"
        "    run.log({'a': 1.0}, step=1)\n    time.sleep(600)\n"
    )
    with background(
        "task=mine.train",
        "allowed_targets=[mine]",
        "world_size=2",
        "launch.shutdown_timeout_s=0.5",
        folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path)},
    ) as process:
        wait_for(lambda: last_step(tmp_path) == 1)
        process.send_signal(signal.SIGINT)
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 128 + signal.SIGINT
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["sentence"]) == (
        "preempted",
        "ended without a checkpoint",
    )


CARRIED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, inputs, carried):
        outputs, carried = self.lstm(inputs, carried)
        return self.head(self.drop(outputs)), carried


def train(run, *, steps):
    model = Net()
    wrapped = run.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    zeros = torch.zeros(1, 2, 8)
    state = {"hidden": zeros, "cell": zeros}
    step = run.restore(model=model, optimizer=optimizer, state=state)
    while step < steps:
        inputs = torch.randn(2, 5, 4)  # each rank its own
        outputs, carried = wrapped(inputs, (state["hidden"], state["cell"]))
        state["hidden"], state["cell"] = (one.detach() for one in carried)
        loss = (outputs - inputs.sum(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        run.log({"loss": loss, **run.sum({"carried": state["hidden"].sum()})}, step=step)
        if run.should_stop(step):
            return
"""


def test_a_carried_hidden_state_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Six steps, and three and three more: the state of an LSTM is each rank's own."""
    keys = ("checkpoint.every_steps=1", "checkpoint.keep=9")
    whole = run_function(CARRIED, "+loop.steps=6", *keys, folder=tmp_path / "whole")
    assert whole.exit_code == 0, whole.stderr
    first = run_function(CARRIED, "+loop.steps=3", *keys, folder=tmp_path / "cut")
    again = run_command(
        f"resume={first.run_dir}",
        "+loop.steps=6",
        "allowed_targets=[mine]",
        folder=tmp_path / "cut",
        environ={"PYTHONPATH": str(tmp_path / "cut")},
    )
    assert again.exit_code == 0, again.stderr
    assert reproducible_metrics(first.run_dir) == reproducible_metrics(whole.run_dir)
    states = [
        torch.load(checkpoint_dir(one, 6) / "state.pt", weights_only=True)
        for one in (first.run_dir, whole.run_dir)
    ]
    assert torch.equal(*(one["by_rank"][1]["state"]["hidden"] for one in states))
    assert not torch.equal(*(one["state"]["hidden"] for one in states[0]["by_rank"]))


TEACHER = """
import torch


def train(run):
    teacher = run.model()  # not wrapped: nothing but the runner gives the ranks its weights
    loader = run.loader(torch.utils.data.TensorDataset(torch.arange(40.0)), global_size=10)
    first = next(iter(loader))  # looked at, to build something of its size
    compiled = torch.compile(teacher)
    run.restore()
    total = sum(float(one.double().sum()) for one in teacher.parameters())
    sums = run.sum({"mine": total, "zeros": total * (run.rank == 0)})
    seen = sum(len(batch) for (batch,) in loader)
    run.log({**sums, "seen": run.sum({"seen": seen})["seen"]}, step=1)
    run.export(compiled)
"""


@pytest.mark.slow
def test_a_teacher_has_its_weights_on_all_ranks(tmp_path: Path) -> None:
    """And a batch that was looked at is not lost, nor do compiled modules export other names."""
    keys = ("model=toy", "train.epochs=1", "world_size=1")
    trained = run_command(*keys, folder=tmp_path / "trained").run_dir
    result = run_function(
        TEACHER, "model=toy", f"model.weights={trained}", folder=tmp_path / "teacher"
    )
    assert result.exit_code == 0, result.stderr
    (line,) = metrics(result.run_dir)
    assert line["mine"] == 2 * line["zeros"]
    assert line["seen"] == 40
    ours, theirs = (load_file(run / "model.safetensors") for run in (result.run_dir, trained))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
