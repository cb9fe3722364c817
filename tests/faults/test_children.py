"""Processes that a rank has started end with its run: with one that completes, with one killed."""

import signal
from pathlib import Path

import psutil
from commands import TIME_LIMIT_S, background, ended, record, session_pids, wait_for
from test_launch import LONG, is_training
from test_signals import MOTHER


def test_the_children_of_ranks_end_with_a_run_that_completes(tmp_path: Path) -> None:
    """Each rank has one, in a session of its own; within 5 s of the launcher's end none lives."""
    (tmp_path / "mother.py").write_text(MOTHER)
    keys = ("model._target_=mother.Mother", "allowed_targets=[mother]", "train.max_steps=4")
    here = {"PYTHONPATH": str(tmp_path)}
    with background(*LONG, *keys, folder=tmp_path, environ=here) as process:
        end = ended(process, tmp_path)
        children = [int((tmp_path / f"child-{rank}").read_text()) for rank in (0, 1)]
        wait_for(lambda: not any(map(psutil.pid_exists, children)), timeout_s=5)
        wait_for(lambda: not session_pids(process.pid), timeout_s=5)
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["status"] == "completed"


def test_the_children_of_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Nobody is left to end them but the server that the ranks were forked from."""
    (tmp_path / "mother.py").write_text(MOTHER)
    keys = ("model._target_=mother.Mother", "allowed_targets=[mother]")
    here = {"PYTHONPATH": str(tmp_path)}
    with background(*LONG, *keys, folder=tmp_path, environ=here) as process:
        wait_for(lambda: is_training(process, tmp_path), timeout_s=TIME_LIMIT_S)
        children = [int((tmp_path / f"child-{rank}").read_text()) for rank in (0, 1)]
        assert all(map(psutil.pid_exists, children))
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(map(psutil.pid_exists, children)), timeout_s=TIME_LIMIT_S)
        wait_for(lambda: not session_pids(process.pid), timeout_s=TIME_LIMIT_S)
