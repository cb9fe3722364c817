"""Processes that a rank has started end with its run: with one that completes, with one killed."""

import shutil
import signal
import subprocess
from pathlib import Path

import psutil
from commands import background, ended, record, session_pids, wait_for
from ranks import run_ranks
from trainings import LONG, MOTHER, is_training

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.processes import adopt_orphans, children, end_adopted


def test_the_children_of_ranks_end_with_a_run_that_completes(tmp_path: Path) -> None:
    """Each rank has one, in a session of its own; none outlives the launcher for long."""
    (tmp_path / "mother.py").write_text(MOTHER)
    keys = ("model._target_=mother.Mother", "allowed_targets=[mother]", "train.max_steps=4")
    here = {"PYTHONPATH": str(tmp_path)}
    with background(*LONG, *keys, folder=tmp_path, environ=here) as process:
        end = ended(process, tmp_path)
        pids = [int((tmp_path / f"child-{rank}").read_text()) for rank in (0, 1)]
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        wait_for(lambda: not session_pids(process.pid))
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["status"] == "completed"


def test_the_children_of_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Nobody is left to end them but the server that the ranks were forked from."""
    (tmp_path / "mother.py").write_text(MOTHER)
    keys = ("model._target_=mother.Mother", "allowed_targets=[mother]")
    here = {"PYTHONPATH": str(tmp_path)}
    with background(*LONG, *keys, folder=tmp_path, environ=here) as process:
        wait_for(lambda: is_training(process, tmp_path))
        pids = [int((tmp_path / f"child-{rank}").read_text()) for rank in (0, 1)]
        assert all(map(psutil.pid_exists, pids))
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        wait_for(lambda: not session_pids(process.pid))


def end_a_family(env: DistEnv, program: str) -> dict[str, bool]:
    """Have a child, and one with a child of its own, left by a third; end what was adopted."""
    adopt_orphans()
    own = subprocess.Popen([program, "-c", "kill -STOP $$"])
    family = [program, "-c", '"$0" -c "kill -STOP \\$\\$" & kill -STOP $$', program]
    mother = ["sh", "-c", '"$@" >&- & echo $!', "sh", *family]
    orphan = int(subprocess.run(mother, stdout=subprocess.PIPE, check=True, text=True).stdout)
    found = {"own": own.pid in children(), "adopted": orphan in children()}
    end_adopted({own.pid})
    found |= {"own lives": own.poll() is None, "others live": children() != {own.pid}}
    own.kill()
    own.wait()
    return found


def test_orphans_of_any_name_end_with_theirs_and_are_no_zombies(tmp_path: Path) -> None:
    """What this process has started itself lives on; a sweep would collect the others' zombies."""
    program = tmp_path / "a) S 1 (b"  # as it stands in /proc, where the parent's number follows
    program.symlink_to(str(shutil.which("sh")))
    (found,) = run_ranks(end_a_family, 1, str(program), backend=None)
    assert found == {"own": True, "adopted": True, "own lives": True, "others live": False}
