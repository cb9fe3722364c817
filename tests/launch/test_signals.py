"""Launchers and ranks answer signals, keep what they were started to ignore, and clean up."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from commands import TIME_LIMIT_S, background, session_pids, wait_for, wait_for_end
from ranks import run_ranks
from run_folders import checkpoint_steps, record, run_dirs
from trainings import CHILD_STARTER, LONG, is_training

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.processes import STOP_SIGNALS
from ddp_runner.host.wire import StopRequest
from ddp_runner.launch.stop_requests import StopRequests, mark_ended
from ddp_runner.tracking.run_record import write_run_record

# A launcher without torch, in the middle of something: it has asked for the lock of run.json.
LAUNCHER = """
import fcntl, os, signal, subprocess, sys, time
from pathlib import Path
from ddp_runner.launch import stop_requests as module
from ddp_runner.launch.stop_requests import StopRequests
from ddp_runner.tracking.run_record import write_run_record

run = Path("run")
write_run_record(run, status="running", started_at=time.time())
runs, timeout_s = [run], float(sys.argv[1])
stop = StopRequests(running=lambda: runs)
stop.may_save = True
is_training = False

def watch(seconds):  # as between two looks at the ranks
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stop.received is not None:
            stop.announce(is_training=is_training)
            if time.monotonic() > stop.asked_at + timeout_s:
                stop.end_at_once()
        time.sleep(0.02)

with stop.handled():
    exec(sys.argv[2])
    Path("ready").touch()
    while stop.received is None:
        time.sleep(0.01)
    exec(sys.argv[3])
print("the end of the block", stop.received, flush=True)
"""
HOLD = "fd = os.open(run, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)"


def launcher(
    folder: Path, *script: str, timeout_s: float = 60.0, ignored: Sequence[int] = ()
) -> "subprocess.Popen[str]":
    """Start a small launcher, which runs a line in its block and another once it is asked."""
    trap = f"trap '' {' '.join(map(str, map(int, ignored)))}; " if ignored else ""
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f'{trap}exec "$@"',
            "bash",
            sys.executable,
            "-c",
            LAUNCHER,
            str(timeout_s),
            *script,
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: (folder / "ready").exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_each_stop_signal_asks_for_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Twice at once, as timeout(1) sends it, is one request."""
    process = launcher(tmp_path, "is_training = True", "watch(0.1)")
    for _ in range(2):
        process.send_signal(signal.Signals[name])
    out, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert f"{name}: finishing the step and saving a checkpoint" in out
    assert out.endswith(f"the end of the block {signal.Signals[name].value}\n")
    assert process.returncode == 0


def test_what_comes_with_a_signal_is_one_request_and_the_first_is_reported(tmp_path: Path) -> None:
    """Systemd sends SIGHUP right after SIGTERM, and the exit code is that of SIGTERM."""
    hang_up = "module.ONE_REQUEST_S = 3600; os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.1)"
    process = launcher(tmp_path, "pass", hang_up)
    process.terminate()
    out, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert out.endswith("the end of the block 15\n")
    assert process.returncode == 0


def test_inherited_ignores_are_kept(tmp_path: Path) -> None:
    """Nohup ignores SIGHUP, a script's background job SIGINT and SIGQUIT; SIGTERM still works."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    process = launcher(tmp_path, "pass", "watch(0.1)", ignored=ignored)
    for signum in (*ignored, signal.SIGTERM):
        process.send_signal(signum)
    out, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert out.strip().endswith("the end of the block 15")
    assert out.count("SIGTERM: stopping; again to end at once") == 1  # no training has begun


@pytest.mark.full
def test_a_second_signal_ends_at_once_even_while_run_json_is_locked(tmp_path: Path) -> None:
    """The main thread or a stopped rank may hold the lock, and the command must not wait for it."""
    wait = f"{HOLD}; Path('asked').touch(); watch(600)"
    process = launcher(tmp_path, "pass", wait)
    process.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "asked").exists)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.communicate()[0].count("\n") == 2
    assert process.returncode == 143


# A child with a child of its own, in a session of theirs, and a second run that cannot be marked.
FAMILY = """
runs.insert(0, Path("damaged"))
runs[0].mkdir()
(runs[0] / "run.json").write_text("{")
child = ["bash", "-c", "sleep 600 & touch grandchild; wait"]
Path("child").write_text(str(subprocess.Popen(child, start_new_session=True).pid))
while not Path("grandchild").exists():
    time.sleep(0.01)
"""


def test_an_end_at_once_leaves_no_process_and_marks_each_run_that_it_can(tmp_path: Path) -> None:
    """Children of children end as well; one run whose record is damaged keeps no other from it."""
    process = launcher(tmp_path, FAMILY, "watch(600)", timeout_s=0.1)
    family = int((tmp_path / "child").read_text())
    wait_for(lambda: len(session_pids(family)) == 2)  # touch(1) may live still
    process.terminate()
    out, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 143
    assert "Traceback" not in out
    wait_for(lambda: not session_pids(family))
    assert record(tmp_path / "run")["status"] == "preempted"


def test_a_run_that_has_ended_is_not_marked(tmp_path: Path) -> None:
    """A signal may come between its end and that of its launcher."""
    write_run_record(tmp_path, status="completed")
    before = record(tmp_path)
    mark_ended(tmp_path)
    assert record(tmp_path) == before


def test_signals_are_answered_as_before_once_the_ranks_are_gone(tmp_path: Path) -> None:
    """The next job of a sweep has not started its ranks yet, and a signal ends the command."""
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    with StopRequests(running=list).handled():
        assert [signal.getsignal(signum) for signum in STOP_SIGNALS] != before
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def asked_twice(env: DistEnv) -> int | None:
    """Answer two signals as a rank of another launcher does."""
    request = StopRequest(None)
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(signum)  # to this very thread, and so answered at once
    assert request()
    return request.received


def test_a_rank_tells_the_first_signal_that_asked_it() -> None:
    """Slurm sends a notice and then SIGTERM; the exit code is that of the notice."""
    assert run_ranks(asked_twice, 1, backend=None) == [signal.SIGUSR1]


def test_ctrl_c_while_imports_run_prints_no_traceback(tmp_path: Path) -> None:
    """The command ends as a shell reports it, here while Hydra is imported."""
    (tmp_path / "hydra").mkdir()
    (tmp_path / "hydra" / "__init__.py").write_text(
        "import time; open('importing', 'w').close(); time.sleep(600)"
    )
    here = {"PYTHONPATH": str(tmp_path)}
    with background(folder=tmp_path, environ=here, fresh=True) as process:
        wait_for((tmp_path / "importing").exists)
        process.send_signal(signal.SIGINT)
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stdout, end.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.full
def test_a_run_in_the_background_outlives_its_terminal(tmp_path: Path, short_temp: Path) -> None:
    """As after `nohup … | head -1 &`, with a cleaner of temporary files, until Slurm's notice.

    SIGHUP and Ctrl-C are ignored by whoever started it; nobody reads what it prints; its scratch
    folder goes. It trains on. SIGUSR1 to the whole process group is then one clean stop, and what
    the ranks have started ends with them.
    """
    (tmp_path / "mother.py").write_text(CHILD_STARTER)
    command = (
        "trap '' HUP INT; "
        f"{sys.executable} -m ddp_runner {' '.join(LONG)} model._target_=mother.Mother "
        "allowed_targets=[mother] > >(head -1 > first)"
    )
    environ = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(short_temp)}
    with background(
        "-c",
        f"{command} & pid=$!; echo $pid > pid; wait $pid",
        folder=tmp_path,
        program=["bash"],
        environ=environ,
    ) as shell:
        wait_for(lambda: is_training(shell, tmp_path))
        launcher_pid = int((tmp_path / "pid").read_text())
        for signum in (signal.SIGHUP, signal.SIGINT):
            os.kill(launcher_pid, signum)
        children = [
            psutil.Process(int((tmp_path / f"child-{rank}").read_text())) for rank in (0, 1)
        ]
        (scratch,) = short_temp.glob("ddp_runner-*/job-*")
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()
        (run_dir,) = run_dirs(tmp_path)
        wait_for(lambda: is_training(shell, tmp_path, step=20))
        assert all(one.is_running() for one in children)
        group = {psutil.Process(launcher_pid), *psutil.Process(launcher_pid).children(True)}
        assert len(group) >= 6  # the launcher, its fork server, two ranks and their children
        for one in group - set(children):
            one.send_signal(signal.SIGUSR1)
        end = wait_for_end(shell, tmp_path)
        wait_for(lambda: not session_pids(shell.pid))
        assert not any(one.is_running() for one in children)
    assert (end.exit_code, end.stderr) == (138, "")
    fields = record(run_dir)
    assert (fields["status"], fields["error"]) == ("preempted", None)
    assert checkpoint_steps(run_dir)[-1] == fields["step"]
    assert "stdout is lost (Broken pipe)" in (run_dir / "logs" / "rank-0.log").read_text()
    assert not list(short_temp.glob("ddp_runner-*"))


@pytest.mark.full
def test_a_rank_of_another_launcher_answers_slurms_notice(tmp_path: Path) -> None:
    """It saves and exits with 128 + the number; SIGHUP stays ignored, and stdout may be closed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    facts = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = f"trap '' HUP; exec {sys.executable} -m ddp_runner {' '.join(LONG)} >&-"
    with background(
        "-c", command, folder=tmp_path, program=["bash"], environ=facts | where
    ) as process:
        wait_for(lambda: is_training(process, tmp_path))
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 138
    assert "Traceback" not in end.stderr
    fields = record(end.run_dir)
    assert fields["status"] == "preempted"
    assert checkpoint_steps(end.run_dir)[-1] == fields["step"]


def test_a_session_of_another_launcher_is_not_marked(tmp_path: Path) -> None:
    """It may be alive; and one that was killed keeps its times."""
    write_run_record(tmp_path, status="running", started_at=1.0)
    mark_ended(tmp_path)
    assert record(tmp_path)["status"] == "running"
    write_run_record(tmp_path, started_at=time.time())
    mark_ended(tmp_path)
    assert record(tmp_path)["status"] == "preempted"
