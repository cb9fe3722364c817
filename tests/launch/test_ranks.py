"""The ranks of a machine and their children end, whichever process is killed."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from commands import (
    background,
    command_line,
    fork_server,
    rank_processes,
    wait_for,
    wait_for_end,
    wait_until_gone,
)
from run_folders import checkpoint_steps, record, run_dirs
from tiers import first_of
from trainings import LONG, children_of_ranks, is_training, starting_children

SAVED = ("checkpoint.every_steps=5", "checkpoint.every_epochs=null")
SWEEP = ("-m", *LONG, "world_size=1", "seed=1,2", "sweep.parallel_jobs=2", "hydra.sweep.dir=sweep")
SERVER_KILLED = "the fork server was killed"


def test_a_killed_server_leaves_no_child_of_a_rank(tmp_path: Path) -> None:
    """The launcher adopts the children and kills them."""
    with starting_children(tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        pids = children_of_ranks(tmp_path, 2)
        fork_server(process.pid).kill()
        end = wait_for_end(process, tmp_path)
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
    assert end.exit_code == 1
    assert SERVER_KILLED in end.stderr


@pytest.mark.full
def test_a_killed_server_is_replaced_where_a_restart_is_left(tmp_path: Path) -> None:
    """The new ranks continue from the last checkpoint."""
    keys = (*SAVED, "launch.max_restarts=1")
    with background(*LONG, *keys, folder=tmp_path, spares=2) as process:
        wait_for(lambda: is_training(process, tmp_path, step=20))
        rank_processes(process.pid)[0].parent().kill()
        log = run_dirs(tmp_path)[0] / "logs" / "rank-0.log"
        wait_for(lambda: "restart 1 of 1" in log.read_text())
        wait_for(lambda: is_training(process, tmp_path, step=30))
        process.terminate()
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (143, "")
    assert SERVER_KILLED in log.read_text()


# The first server of a command waits in the midst of importing torch.
HOLD = """
import pathlib, sys, time

class Hold:
    def find_spec(self, name, *_):
        held = pathlib.Path("held")
        if name == "torch._dynamo" and not held.exists():
            held.touch()
            time.sleep(600)

if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, Hold())
"""


def importing_server(launcher_pid: int) -> psutil.Process:
    """Return the fork server of a new interpreter, once it is there."""
    return wait_for(
        lambda: [
            one
            for one in psutil.Process(launcher_pid).children()
            if "multiprocessing.forkserver" in command_line(one)
        ]
    )[0]


@pytest.mark.full
def test_a_server_that_is_killed_while_it_imports_is_replaced(tmp_path: Path) -> None:
    """No rank has started yet, so nothing is lost."""
    (tmp_path / "sitecustomize.py").write_text(HOLD)
    environ = {"PYTHONPATH": str(tmp_path)}
    with background(*LONG, folder=tmp_path, environ=environ, fresh=True) as process:
        wait_for((tmp_path / "held").exists)
        importing_server(process.pid).kill()
        wait_for(lambda: is_training(process, tmp_path))
        process.terminate()
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (143, "")


# It kills itself once it has imported everything, at its first or its second rank.
KILL = """
import os, signal, sys

if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    ranks = [0]
    def kill():
        ranks[0] += 1
        if ranks[0] == NUMBER:
            os.kill(os.getpid(), signal.SIGKILL)
    os.register_at_fork(before=kill)
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("number", first_of([2, 1], num_full=0))
def test_a_server_that_is_killed_while_ranks_start_is_named(tmp_path: Path, number: int) -> None:
    """A server that is killed later has the same sentence; a second one ends like the first."""
    (tmp_path / "sitecustomize.py").write_text(KILL.replace("NUMBER", str(number)))
    environ = {"PYTHONPATH": str(tmp_path)}
    with background("model=toy", folder=tmp_path, environ=environ, fresh=True) as process:
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 1
    (line,) = end.stderr.split("\n", 1)[:1]
    assert line.startswith(f"error: {SERVER_KILLED}")
    assert end.stderr.strip() == line
    assert record(end.run_dir)["status"] == "failed"


LOUD = """
import os
from torch import nn

class Loud(nn.Linear):
    def __init__(self):
        super().__init__(10, 5)

    def forward(self, inputs):
        if os.environ["RANK"] == "1" and self.training:
            raise ZeroDivisionError("loud " + "x" * 1_000_000)
        return super().forward(inputs)
"""


@pytest.mark.full
def test_an_error_of_a_megabyte_is_cut(tmp_path: Path) -> None:
    """Its message must fit into one write of the rank's pipe."""
    (tmp_path / "loud.py").write_text(LOUD)
    keys = ("model=toy", "model._target_=loud.Loud", "allowed_targets=[loud]")
    environ = {"PYTHONPATH": str(tmp_path)}
    with background(*keys, folder=tmp_path, environ=environ) as process:
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 1
    assert end.stderr.startswith("error: rank 1 raised ZeroDivisionError: loud xxx")
    assert len(end.stderr) < 30_000
    assert len(record(end.run_dir)["error"]["sentence"]) < 10_000


@pytest.mark.parametrize("is_training_yet", first_of([False, True]))
def test_ctrl_c_while_a_command_starts_ends_it(tmp_path: Path, *, is_training_yet: bool) -> None:
    """It comes while the server imports torch, or as soon as the ranks train."""
    with background(*LONG, folder=tmp_path, fresh=True) as process:
        if is_training_yet:
            wait_for(lambda: is_training(process, tmp_path))
        else:
            importing_server(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert "Traceback" not in end.stderr
    assert end.exit_code in (128 + signal.SIGINT, -signal.SIGINT)
    assert all(record(run)["status"] == "preempted" for run in run_dirs(tmp_path))


@pytest.mark.full
def test_a_request_that_comes_between_two_attempts_reaches_the_second(tmp_path: Path) -> None:
    """Its ranks start after the signal."""
    with background(*LONG, *SAVED, "launch.max_restarts=3", folder=tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        rank_processes(process.pid)[1].kill()
        process.send_signal(signal.SIGTERM)
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert (end.exit_code, end.stderr) == (143, "")
    assert record(end.run_dir)["status"] == "preempted"


@pytest.mark.parametrize("rank", first_of([1, 0]))
def test_sigterm_to_one_rank_asks_all_to_save_and_end(tmp_path: Path, rank: int) -> None:
    """A user may send it by hand, or a manager of single processes."""
    with background(*LONG, folder=tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        rank_processes(process.pid)[rank].terminate()
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert (end.exit_code, end.stderr) == (143, "")
    assert record(end.run_dir)["status"] == "preempted"
    assert checkpoint_steps(end.run_dir)
    log = (end.run_dir / "logs" / f"rank-{rank}.log").read_text()
    assert f"rank {rank} alone received SIGTERM\n" in log


def started_jobs(folder: Path) -> list[Path]:
    """Return the folders of two parallel jobs, once both train."""
    runs = [folder / "sweep" / f"seed={seed}" for seed in (1, 2)]
    wait_for(lambda: all((run / "metrics.jsonl").exists() for run in runs))
    return runs


@pytest.mark.full
def test_a_request_to_a_sweep_saves_its_parallel_jobs(tmp_path: Path) -> None:
    """Each slot has a launcher of its own, which ignores signals and asks its ranks."""
    with background(*SWEEP, folder=tmp_path, spares=4) as process:
        runs = started_jobs(tmp_path)
        process.send_signal(signal.SIGTERM)
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert end.exit_code == 143
    assert [(record(run)["status"], record(run)["error"]) for run in runs] == [
        ("preempted", None)
    ] * 2


@pytest.mark.full
def test_a_second_signal_ends_parallel_jobs_at_once(tmp_path: Path) -> None:
    """Their ranks are suspended, and could not save."""
    keys = (*SWEEP, "launch.shutdown_timeout_s=600")
    with background(*keys, folder=tmp_path, spares=4) as process:
        runs = started_jobs(tmp_path)
        for one in rank_processes(process.pid).values():
            one.suspend()
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert end.exit_code == 143
    assert [record(run)["status"] for run in runs] == ["preempted"] * 2
