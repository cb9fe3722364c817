"""Processes that a rank has started end with its run; those of trackers end soon after it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import own_trackers
import psutil
import pytest
from commands import TIME_LIMIT_S, fork_server, wait_for, wait_for_end, wait_until_gone
from injection import At, Fault, call_all, raise_error, send_launcher, wait_until
from ranks import run_ranks
from run_folders import record, scalars
from tiers import first_of
from trainings import RUN, children_of_ranks, is_training, run_training, starting_children

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.processes import (
    adopt_orphans,
    children,
    end_descendants,
    kill_descendants,
    release_fork_server,
)


@pytest.mark.full
def test_children_of_ranks_end_with_a_completed_run(tmp_path: Path) -> None:
    """Each rank has a child in a session of its own; none outlives the launcher for long."""
    with starting_children(tmp_path, "train.max_steps=4") as process:
        end = wait_for_end(process, tmp_path)
        pids = children_of_ranks(tmp_path, 2)
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        wait_until_gone(process)
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["status"] == "completed"


def test_children_of_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """Only the server that the ranks were forked from is left to end them."""
    with starting_children(tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        pids = children_of_ranks(tmp_path, 2)
        assert all(map(psutil.pid_exists, pids))
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        wait_until_gone(process)


@pytest.mark.full
def test_ranks_leave_their_children_to_a_server_that_is_late(tmp_path: Path) -> None:
    """Ranks that ended by themselves would leave them behind, where nobody finds them."""
    with starting_children(tmp_path) as process:
        wait_for(lambda: is_training(process, tmp_path))
        pids = children_of_ranks(tmp_path, 2)
        server = fork_server(process.pid)
        server.suspend()
        process.send_signal(signal.SIGKILL)
        time.sleep(1.0)
        server.resume()
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        wait_until_gone(process)


def close_pipe_on_signal() -> None:
    """Let a launcher close the fork server's pipe at a signal, and do nothing from then on."""

    def close(*_: object) -> None:
        release_fork_server()
        os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGRTMIN, close)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even if nobody has collected it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.full
def test_children_of_ranks_end_when_the_servers_pipe_closes(tmp_path: Path) -> None:
    """A dying launcher's pipe may close long before the kernel signals its death."""
    with starting_children(tmp_path, prepare=close_pipe_on_signal) as process:
        wait_for(lambda: is_training(process, tmp_path))
        pids = children_of_ranks(tmp_path, 2)
        assert not any(map(is_gone, pids))
        process.send_signal(signal.SIGRTMIN)
        wait_for(lambda: all(map(is_gone, pids)))


def end_adopted_orphans(env: DistEnv, program: str) -> dict[str, bool]:
    """Start a child, adopt an orphan with a child, end what was adopted; return what is alive."""
    adopt_orphans()
    own = subprocess.Popen([program, "-c", "kill -STOP $$"])
    family = [program, "-c", '"$0" -c "kill -STOP \\$\\$" & kill -STOP $$', program]
    parent = ["sh", "-c", '"$@" >&- & echo $!', "sh", *family]
    orphan = int(subprocess.run(parent, stdout=subprocess.PIPE, check=True, text=True).stdout)
    seen = {"own": own.pid in children(), "adopted": orphan in children()}
    end_descendants({own.pid})
    seen |= {"own is alive": own.poll() is None, "others are alive": children() != {own.pid}}
    own.kill()
    own.wait()
    return seen


@pytest.mark.full
def test_adopted_orphans_end_whatever_their_name(tmp_path: Path) -> None:
    """A child of this process stays alive, and no zombie is left, which a sweep would collect."""
    program = tmp_path / "a) S 1 (b"  # /proc shows it in the line where the parent's number follows
    program.symlink_to(str(shutil.which("sh")))
    (seen,) = run_ranks(end_adopted_orphans, 1, str(program), backend=None)
    assert seen == {"own": True, "adopted": True, "own is alive": True, "others are alive": False}


def kill_all_but_trackers(env: DistEnv) -> list[bool]:
    """Start a tracker below a slot, and something else; return whether they outlive the end."""
    sleep = "import time; time.sleep(600)"
    family = f"""
import subprocess, sys
for name in ("ddp_runner.tracking.track", "other"):
    one = subprocess.Popen([sys.executable, "-c", {sleep!r}, name], stdout=subprocess.DEVNULL)
    print(one.pid, flush=True)
{sleep}
"""
    with subprocess.Popen([sys.executable, "-c", family], stdout=subprocess.PIPE) as slot:
        assert slot.stdout is not None
        pids = [int(slot.stdout.readline()) for _ in range(2)]
        kill_descendants()
    wait_for(lambda: is_gone(pids[1]))
    are_alive = [psutil.pid_exists(pids[0]), not is_gone(pids[0])]
    os.kill(pids[0], signal.SIGKILL)
    return are_alive


@pytest.mark.full
def test_an_end_at_once_leaves_trackers_alone() -> None:
    """They end by themselves, also those of a sweep's slots."""
    assert run_ranks(kill_all_but_trackers, 1, backend=None) == [[True, True]]


@pytest.mark.full
def test_what_a_tracker_forks_ends_with_its_run(tmp_path: Path) -> None:
    """Even a copy of it in a session of its own."""
    path = tmp_path / "calls"
    end = run_training(
        tmp_path,
        args=(
            "world_size=1",
            "allowed_targets=[own_trackers]",
            "+trackers.mine._target_=own_trackers.Forking",
            f"+trackers.mine.path={path}",
        ),
        environ={"PYTHONPATH": str(Path(own_trackers.__file__).parent)},
    )
    assert end.exit_code == 0
    assert is_gone(own_trackers.calls(path)[-1]["pid"])


@pytest.mark.parametrize("how", first_of(["the launcher is killed", "rank 0 raises"]))
def test_a_tracker_sends_what_is_left_after_its_run(tmp_path: Path, how: str) -> None:
    """All lines, and that the run has failed; run.json, which may lack the error, stays."""
    path = tmp_path / "calls"
    what = raise_error if "raises" in how else partial(send_launcher, signal.SIGKILL)
    has_taken_step = partial(wait_until, str(path), '"log"')
    no_step = partial(time.sleep, TIME_LIMIT_S)  # else the run may end before its rank does
    end = run_training(
        tmp_path,
        Fault(partial(call_all, has_taken_step, what, no_step), At(0, 11)),
        args=(
            "world_size=1",
            "allowed_targets=[own_trackers]",
            "+trackers.mine._target_=own_trackers.Lingering",
            f"+trackers.mine.path={path}",
        ),
        environ={"PYTHONPATH": str(Path(own_trackers.__file__).parent)},
    )
    run_dir, is_raised = tmp_path / RUN, what is raise_error
    assert end.exit_code == (1 if is_raised else -signal.SIGKILL)
    last = {"end": "failed", "metrics": {}, "files": ["config.yaml"]}
    assert own_trackers.calls(path)[-1] == last
    shown = [(step, name) for step, name, _ in own_trackers.points(path)]
    assert sorted(shown) == sorted(scalars(run_dir))
    late = "trackers.mine had not ended 2 s after the run, and gets 10 s more"
    assert (f"warning: {late}\n" in end.stdout) == is_raised
    assert record(run_dir)["warnings"] == []
