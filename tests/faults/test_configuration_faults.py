"""Mistakes in configs and unusable places: real commands, each answered in one line."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import (
    TIME_LIMIT_S,
    WATCH_TORCH,
    background,
    error_line,
    free_port,
    run_command,
    wait_for_end,
    wait_until_gone,
)
from run_folders import rank_log, record, run_dirs
from tiers import first_of

FEW = ("model=toy", "train.num_threads=1", "train.log_every_steps=1", "train.max_steps=2")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # so that every machine gives the same answer
OWN_GROUP = "name: rmsprop\n_target_: torch.optim.RMSprop\nlr: 0.01\n"

# What was mistaken, the command line, the whole error line; every other rule is one of those that
# config/test_resolve.py breaks in one process.
MISTAKES = {
    "wrong_type": ("train.epochs=abc", "train.epochs (abc) must be a whole number"),
    "nccl_without_cuda": (
        "backend=nccl",
        "backend=nccl needs CUDA devices and this machine shows none; write backend=auto",
    ),
    "mistyped_key_beside_own_groups": (
        "--config-dir mine optimizer=rmsprop train.epoch=3",
        "train.epoch is not a key of the config; did you mean train.epochs?",
    ),
}
# The same, but only the beginning of the line: the rest depends on this machine or lists options.
PARTLY = {
    "absurd_number_of_samples": (
        "dataset=fake_images dataset.height=1000 dataset.width=1000 dataset.num_samples=1000000000",
        "dataset=fake_images of 1000000200 samples takes 931323 GiB and this machine has ",
    ),
    "target_of_no_package": (
        "model._target_=nowhere.Net",
        "model._target_ (nowhere.Net) needs nowhere, which is not installed",
    ),
}


def answer_before_torch(
    *args: str, folder: Path, environ: Mapping[str, str | None] | None = None
) -> str:
    """Return the error line of a new interpreter that imports no torch and leaves no process."""
    program = (sys.executable, "-c", WATCH_TORCH)
    with background(*args, folder=folder, program=program, environ=environ) as process:
        end = wait_for_end(process, folder)
        wait_until_gone(process)
    assert end.stdout == "False\n"
    return error_line(end)


def names(folder: Path) -> list[str]:
    """Return the names in a folder, without the files of a command's streams."""
    return sorted({path.name for path in folder.iterdir()} - {"stdout", "stderr"})


@pytest.mark.parametrize("row", first_of([*MISTAKES, *PARTLY], num_quick=2))
def test_each_mistake_is_answered_before_torch_is_imported(row: str, tmp_path: Path) -> None:
    """Exit code 2, one line with rule, values and fix; no torch, folder or process."""
    args, sentence = {**MISTAKES, **PARTLY}[row]
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "rmsprop.yaml").write_text(OWN_GROUP)
    answer = answer_before_torch(*args.split(), folder=tmp_path, environ=NO_GPU)
    assert (answer if row in MISTAKES else answer[: len(sentence)]) == sentence
    assert row in MISTAKES or "; " in answer
    assert names(tmp_path) == ["mine"]


def test_a_backend_missing_from_torch_is_named(tmp_path: Path) -> None:
    """Only torch knows whether it has MPI, so a rank answers, and nothing else does."""
    end = run_command(*FEW, "backend=mpi", "hydra.run.dir=run", folder=tmp_path)
    line = error_line(end)
    assert line.startswith("backend=mpi needs a torch built with MPI")
    assert "; write backend=gloo" in line
    assert record(end.run_dir)["status"] == "failed"


# The command line and a part of the error line; `file` is a file, and not even root may write to
# /proc/self.
PLACES = {
    "outputs_is_a_file": (
        "",
        "cannot be created (Not a directory); start in a folder that you may write to, or give "
        "hydra.run.dir=FOLDER",
    ),
    "run_folder_not_writable": (
        "hydra.run.dir=/proc/self",
        "the run folder /proc/self is not writable; give hydra.run.dir=FOLDER",
    ),
    "run_folder_below_a_file": (
        "hydra.run.dir=file/x",
        "file/x: Not a directory; give folders that exist or can be made",
    ),
    "sweep_folder_not_writable": ("-m seed=1,2 hydra.sweep.dir=/proc/self", "/proc/self"),
    "sweep_folder_below_a_file": ("-m seed=1,2 hydra.sweep.dir=file/x", "file/x: Not a directory"),
}


@pytest.mark.parametrize("row", first_of(PLACES))
def test_an_unwritable_output_folder_is_reported_before_torch_is_imported(
    row: str, tmp_path: Path
) -> None:
    """The path, the reason and the key that names another folder; nothing is created."""
    args, part = PLACES[row]
    (tmp_path / "file").write_text("mine")
    if row == "outputs_is_a_file":
        (tmp_path / "outputs").write_text("mine")
    kept = names(tmp_path)
    answer = answer_before_torch("model=toy", *args.split(), folder=tmp_path)
    assert part in answer
    assert "; " in answer
    assert names(tmp_path) == kept
    assert (tmp_path / "file").read_text() == "mine"


def full_disk() -> None:
    """Let the command see a disk with 7 MiB left."""
    usage: Any = SimpleNamespace(total=2**40, used=2**40 - 7 * 2**20, free=7 * 2**20)
    shutil.disk_usage = lambda path: usage


@pytest.mark.parametrize("args", first_of(["", "hydra.run.dir=run", "-m seed=1,2"]))
def test_a_nearly_full_disk_is_reported_before_a_rank_starts(args: str, tmp_path: Path) -> None:
    """Free space, needed space, what helps; the folder that was created for the run is gone."""
    end = run_command(*FEW, *args.split(), folder=tmp_path, prepare=full_disk)
    answer = error_line(end)
    assert answer.startswith("7 MiB are free for the run folder ")
    assert answer.endswith(
        " and a run needs 100; free some, or give hydra.run.dir=FOLDER on another disk"
    )
    assert end.run_dirs == []
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", first_of(["../../up", "..", ".", "/abs", "a=b, c"]))
def test_a_name_never_leaves_the_outputs_folder(name: str, tmp_path: Path) -> None:
    """Each name becomes one folder below outputs/, and the run completes in it."""
    folder = tmp_path / "here" / "below"
    end = run_command(*FEW, "world_size=1", f"name='{name}'", folder=folder)
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.run_dir.parents[1] == folder / "outputs"
    assert record(end.run_dir)["status"] == "completed"
    assert names(folder) == ["outputs"]
    assert names(tmp_path) == ["here"]


def one_core() -> None:
    """Let the command use only one of this machine's cores."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_more_ranks_than_cores_give_one_warning(tmp_path: Path) -> None:
    """On stdout and in rank 0's log; the run completes."""
    end = run_command(*FEW, "world_size=2", folder=tmp_path, prepare=one_core)
    assert (end.exit_code, end.stderr) == (0, "")
    sentence = "warning: 2 ranks on 1 cores: they take turns, expect no speedup"
    logs = [rank_log(end.run_dir, rank) for rank in (0, 1)]
    assert [text.count(sentence) for text in (end.stdout, *logs)] == [1, 1, 0]


SECRET = "hunter2-of-mine"
LEAK = '''
import os, sys
from ddp_runner.models.toy import ToyModel

class Leak(ToyModel):
    """Shows its secret in one of several ways, in the second step of rank 1."""

    def __init__(self, token, listed, when):
        super().__init__()
        assert token == listed[1]
        self.token, self.when, self.calls = token, when, 0
        if when == "init":
            raise RuntimeError(f"no access with {self.token}")

    def forward(self, inputs):
        if not self.training:
            return super().forward(inputs)
        self.calls += 1
        if self.calls == 2 and os.environ["RANK"] == "1":
            if self.when == "step":
                raise RuntimeError(f"no access with {self.token}")
            if self.when == "mapping":
                raise ValueError({"token": self.token})
            if self.when == "exit":
                sys.exit(f"bye {self.token}")
            if self.when == "interrupt":
                raise KeyboardInterrupt(self.token)
            print("I have", self.token)
            print("I have", self.token, file=sys.stderr)
        return super().forward(inputs)
'''
WAYS = ("init", "step", "mapping", "exit", "interrupt", "print")


@pytest.mark.full
def test_a_secret_is_in_no_file_however_a_rank_ends(tmp_path: Path) -> None:
    """By an error, sys.exit, KeyboardInterrupt or print: the variable's name replaces it.

    In a run's config, checkpoints, TensorBoard, logs and record, in the sweep's plan, on stdout.
    """
    (tmp_path / "leak.py").write_text(LEAK)
    end = run_command(
        "-m",
        *FEW,
        "model._target_=leak.Leak",
        "allowed_targets=[leak]",
        "world_size=2",
        "+model.token=${oc.env:MY_SECRET}",
        "+model.listed=[a,'${model.token}']",
        f"+model.when={','.join(WAYS)}",
        "hydra.sweep.dir=sweep",
        folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path), "MY_SECRET": SECRET},
    )
    assert end.exit_code == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    jobs = {when: record(tmp_path / "sweep" / f"model.when={when}") for when in WAYS}
    errors = {when: fields["error"] for when, fields in jobs.items() if fields["error"]}
    assert errors.keys() == set(WAYS) - {"print"}
    assert all("${oc.env:MY_SECRET}" in error["sentence"] for error in errors.values())
    log = rank_log(tmp_path / "sweep" / "model.when=print", 1)
    assert log.count("I have ${oc.env:MY_SECRET}") == 2


def same_second() -> None:
    """Stop the clock that names run folders."""
    from ddp_runner.tracking import outputs

    outputs.timestamp = lambda: "2026-01-01_00-00-00"


@pytest.mark.parametrize("is_sweep", first_of([False, True]), ids=["runs", "sweeps"])
def test_commands_in_the_same_second_get_separate_folders(is_sweep: bool, tmp_path: Path) -> None:
    """Two processes whose folders would have the same name: one folder gets a number."""
    # The sweeps differ, because two launchers of the same sweep would share its jobs.
    chosen = (["-m", "seed=1,2"], ["-m", "seed=3,4"]) if is_sweep else (["seed=1"], ["seed=1"])
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                background(*args, *FEW, "world_size=1", folder=tmp_path, prepare=same_second)
            )
            for args in chosen
        ]
        assert [process.wait(TIME_LIMIT_S) for process in both] == [0, 0]
    runs = run_dirs(tmp_path)
    assert len(runs) == (4 if is_sweep else 2)
    assert [record(path)["status"] for path in runs] == ["completed"] * len(runs)
    folders = sorted({(path.parent if is_sweep else path).name for path in runs})
    assert [name.partition("_00-00-00")[2] for name in folders] == ["", "-2"]


def revision_by_rank() -> None:
    """Give this rank a commit of its own."""
    from ddp_runner.cli import start_runs

    start_runs.git_revisions = lambda: {"git_revision": f"commit-{os.environ['RANK']}"}


def torch_by_rank() -> None:
    """Give this rank a version of torch of its own."""
    from ddp_runner.cli import start_runs

    start_runs.versions = lambda: {"torch": f"2.{os.environ['RANK']}"}


def nothing() -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("prepare", "args", "sentence"),
    first_of(
        [
            (nothing, "seed=RANK", "seed is 0 on rank 0 and 1 on rank 1"),
            (revision_by_rank, "", "git_revision is commit-0 on rank 0 and commit-1 on rank 1"),
            (
                torch_by_rank,
                "",
                "versions is {'torch': '2.0'} on rank 0 and {'torch': '2.1'} on rank",
            ),
        ]
    ),
    ids=["config", "code", "torch"],
)
def test_ranks_launched_differently_do_not_start(
    prepare: Callable[[], None], args: str, sentence: str, tmp_path: Path
) -> None:
    """Under another launcher: the key, both values and their ranks; no run folder."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        folders = [tmp_path / str(rank) for rank in (0, 1)]
        ranks = [
            stack.enter_context(
                background(
                    *FEW,
                    *args.replace("RANK", folder.name).split(),
                    folder=folder,
                    environ={**where, "RANK": folder.name, "LOCAL_RANK": folder.name},
                    prepare=prepare,
                )
            )
            for folder in folders
        ]
        ends = [
            wait_for_end(process, folder) for process, folder in zip(ranks, folders, strict=True)
        ]
    answer = error_line(ends[0])  # only the first rank of a machine prints
    assert answer.startswith(f"ranks were launched differently: {sentence}")
    assert answer.endswith("; start every rank with the same command and code")
    assert (ends[1].exit_code, ends[1].stderr) == (2, "")
    assert run_dirs(tmp_path) == []
