"""One small training that faults are put into, and what must come of it; a helper, not a test."""

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from commands import (
    Ended,
    Started,
    assert_same_state,
    background,
    ended,
    last_step,
    metrics,
    numbers,
    record,
    run_command,
    session_pids,
    steps,
    wait_for,
)
from injection import Fault, prepared
from safetensors.torch import load_file

from ddp_runner.checkpoint.manifest import verify
from ddp_runner.checkpoint.store import newest_first

QUICK = ("model=toy", "train.num_threads=1", "train.log_every_steps=1")

MOTHER = '''
import os, subprocess
from torch import nn
from ddp_runner.models.mnist_net import Net

class Mother(Net):
    """Has a child process on each rank, in a session of its own, and says which."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"child-{os.environ['RANK']}", "w") as file:
            file.write(str(child.pid))
'''

# Long enough to be hit in its midst; a step takes some milliseconds.
LONG = (
    "model=mnist_net",
    "dataset=fake_images",
    "dataset.num_samples=64",
    "batch.global_size=8",
    "train.epochs=10000",
    "train.log_every_steps=1",
    "train.num_threads=1",
)

EQUAL = (
    "model=toy",
    "train.max_steps=400",
    "train.epochs=1000",
    "dataset.num_samples=4000",
    "checkpoint.every_steps=20",
    "train.num_threads=1",
    "backend.timeout_s=60",
)

NUM_STEPS = 18
RUN = "run"
# Six epochs of three steps, with an evaluation after each; saved after every other step.
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
GONE_S = 60.0  # far above the usual: a busy machine is no failure


def trained(
    folder: Path,
    *faults: Fault,
    args: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Run the training with faults to its end, and until no process of it is left."""
    prepare = prepared(*faults)
    with background(*TOY, *args, folder=folder, prepare=prepare, environ=environ) as process:
        end = ended(process, folder)
        wait_for_nobody(process)
    return end


def wait_for_nobody(process: Started) -> None:
    """Wait until no process of a command is left, those of its ranks included."""
    wait_for(lambda: not session_pids(process.pid), timeout_s=GONE_S)


def error_line(end: Ended) -> str:
    """Return the one sentence with which a command failed, and which names no line of code."""
    (line,) = [one for one in end.stderr.splitlines() if one]
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def assert_all_whole(folder: Path) -> None:
    """Check that whatever has a checkpoint's name in a run is whole."""
    paths = newest_first(folder / RUN / "checkpoints")
    assert paths
    for path in paths:
        verify(path)


def assert_same_run(one: Path, undisturbed: Path, *, same_steps: bool = True) -> None:
    """Compare two completed runs, bit for bit: what they logged, kept and learned.

    Args:
        one: a run.
        undisturbed: another one.
        same_steps: whether both keep the same steps; one that was stopped has saved another.
    """
    assert (record(one)["status"], record(one)["error"]) == ("completed", None)
    assert numbers(one) == numbers(undisturbed)
    assert not same_steps or steps(one) == steps(undisturbed)
    assert_same_state(one, undisturbed)
    weights = [load_file(run / "model.safetensors") for run in (one, undisturbed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def assert_resumes(folder: Path, undisturbed: Path, *, same_steps: bool = True) -> Ended:
    """Resume the training in a folder, and compare its end with that of the undisturbed run."""
    end = run_command(f"resume={RUN}", folder=folder)
    assert (end.exit_code, end.stderr) == (0, "")
    assert "resumed from" in (folder / RUN / "logs" / "rank-0.log").read_text()
    assert_same_run(folder / RUN, undisturbed, same_steps=same_steps)
    return end


def place(folder: Path, name: str) -> Path:
    """Return a folder to start a command in, whose runs are those of the other places too."""
    (folder / "outputs").mkdir(exist_ok=True)
    (folder / name).mkdir(exist_ok=True)
    if not (folder / name / "outputs").exists():
        (folder / name / "outputs").symlink_to(folder / "outputs")
    return folder / name


def assert_went_on(run_dir: Path, *, num_steps: int = 400) -> None:
    """Check that a run took each step once, the second attempt's from a checkpoint on."""
    assert (record(run_dir)["status"], record(run_dir)["step"]) == ("completed", num_steps)
    logged = [line["step"] for line in metrics(run_dir) if "train/loss" in line]
    assert logged == list(range(10, num_steps + 1, 10))
    assert "resumed from" in (run_dir / "logs" / "rank-0.log").read_text()


def is_training(process: subprocess.Popen[str], folder: Path, *, step: int = 3) -> bool:
    """Tell whether a run has come so far; fail if it has ended before."""
    assert process.poll() is None, (folder / "stderr").read_text()
    return last_step(folder) >= step


def only_sentence(end: Ended, *, code: int = 2) -> str:
    """Return the one line that a refused command has written, without its beginning."""
    assert (end.exit_code, "Traceback" in end.stderr + end.stdout) == (code, False), end.stderr
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def free_port() -> int:
    """Return a port of loopback that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
