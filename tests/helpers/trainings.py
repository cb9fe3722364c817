"""Small trainings for tests of whole runs, and what a disturbed run must come to."""

import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from commands import (
    CommandResult,
    Started,
    background,
    run_command,
    wait_for,
    wait_for_end,
    wait_until_gone,
)
from injection import Fault, inject
from run_folders import (
    assert_same_state,
    checkpoint_steps,
    last_step,
    metrics,
    rank_log,
    record,
    reproducible_metrics,
)
from safetensors.torch import load_file

from ddp_runner.checkpoint.manifest import verify
from ddp_runner.checkpoint.store import newest_first

RUN = "run"
NUM_STEPS = 18
# Six epochs of three steps, with an evaluation after each; saved after every second step.
TOY = (
    "model=toy",
    "dataset.num_samples=24",
    "batch.global_size=8",
    f"train.max_steps={NUM_STEPS}",
    "train.epochs=6",
    "optimizer=adam",
    "train.log_every_steps=1",
    "train.num_threads=1",
    "checkpoint.every_steps=2",
    "checkpoint.every_epochs=null",
    "checkpoint.keep=3",
    "backend.timeout_s=120",
    f"hydra.run.dir={RUN}",
)
# Long enough to be interrupted; a step takes some milliseconds.
LONG = (
    "model=mnist_net",
    "dataset=fake_images",
    "dataset.num_samples=64",
    "dataset.eval_samples=16",
    "batch.global_size=8",
    "train.epochs=10000",
    "train.log_every_steps=1",
    "train.num_threads=1",
)
# In the outputs folder, so that equal commands must keep their runs apart.
EQUAL = (
    "model=toy",
    "train.max_steps=400",
    "train.epochs=1000",
    "dataset.num_samples=4000",
    "checkpoint.every_steps=20",
    "train.num_threads=1",
    "backend.timeout_s=60",
)
CHILD_STARTER = '''
import os, subprocess
from torch import nn
from ddp_runner.models.mnist_net import Net

class Mother(Net):
    """Starts a child process on each rank, in a session of its own, and writes its number."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"child-{os.environ['RANK']}", "w") as file:
            file.write(str(child.pid))
'''


def starting_children(
    folder: Path, *keys: str, prepare: Callable[[], None] | None = None
) -> AbstractContextManager[Started]:
    """Start a long training, each rank of which starts a child in a session of its own."""
    (folder / "mother.py").write_text(CHILD_STARTER)
    return background(
        *LONG,
        "model._target_=mother.Mother",
        "allowed_targets=[mother]",
        *keys,
        folder=folder,
        environ={"PYTHONPATH": str(folder)},
        prepare=prepare,
    )


def children_of_ranks(folder: Path, number: int) -> list[int]:
    """Return the process ids of the ranks' children, once all have started."""

    def known() -> list[int]:
        texts = [path.read_text() for path in folder.glob("child-*")]
        return [int(text) for text in texts if text]

    wait_for(lambda: len(known()) == number)
    return known()


def run_training(
    folder: Path,
    *faults: Fault,
    args: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run TOY with faults until it has ended and none of its processes is left."""
    with background(*TOY, *args, folder=folder, prepare=inject(*faults), environ=environ) as run:
        end = wait_for_end(run, folder)
        wait_until_gone(run)
    return end


def is_training(process: subprocess.Popen[str], folder: Path, *, step: int = 3) -> bool:
    """Return whether the run has reached a step; fail if the command has ended."""
    assert process.poll() is None, (folder / "stderr").read_text()
    return last_step(folder) >= step


def assert_checkpoints_whole(folder: Path) -> None:
    """Assert that RUN has checkpoints, and that all are undamaged."""
    paths = newest_first(folder / RUN / "checkpoints")
    assert paths
    for path in paths:
        verify(path)


def assert_same_run(run_dir: Path, uninterrupted: Path, *, same_steps: bool = True) -> None:
    """Compare two completed runs bit for bit: metrics, checkpoints and exported weights.

    Args:
        run_dir: the folder of the run to check.
        uninterrupted: the folder of a run without a fault.
        same_steps: whether both keep checkpoints of the same steps; a stop saves another step.
    """
    assert (record(run_dir)["status"], record(run_dir)["error"]) == ("completed", None)
    assert reproducible_metrics(run_dir) == reproducible_metrics(uninterrupted)
    assert not same_steps or checkpoint_steps(run_dir) == checkpoint_steps(uninterrupted)
    assert_same_state(run_dir, uninterrupted)
    weights = [load_file(run / "model.safetensors") for run in (run_dir, uninterrupted)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def assert_resumes(folder: Path, uninterrupted: Path, *keys: str, same_steps: bool = True) -> None:
    """Resume RUN in a folder, and compare its end with the uninterrupted run."""
    end = run_command(f"resume={RUN}", *keys, folder=folder)
    assert (end.exit_code, end.stderr) == (0, "")
    assert "resumed from" in rank_log(folder / RUN)
    assert_same_run(folder / RUN, uninterrupted, same_steps=same_steps)


def shared_outputs(folder: Path, name: str) -> Path:
    """Return a new folder to start a command in; all of them share one outputs folder."""
    (folder / "outputs").mkdir(exist_ok=True)
    (folder / name).mkdir(exist_ok=True)
    if not (folder / name / "outputs").exists():
        (folder / name / "outputs").symlink_to(folder / "outputs")
    return folder / name


def assert_continued(run_dir: Path, *, num_steps: int = 400) -> None:
    """Assert that a run was resumed from a checkpoint and took each step once."""
    assert (record(run_dir)["status"], record(run_dir)["step"]) == ("completed", num_steps)
    logged = [line["step"] for line in metrics(run_dir) if "train/loss" in line]
    assert logged == list(range(10, num_steps + 1, 10))
    assert "resumed from" in rank_log(run_dir)
