"""Launchers that meet as machines do, all on this one, so that no right is needed."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import Started, background, free_port, wait_for, wait_for_end
from run_folders import checkpoint_steps, record, run_dirs
from trainings import EQUAL, assert_continued, shared_outputs


@contextmanager
def launchers(
    folder: Path, *keys: str, count: int = 2, port: int
) -> Iterator[list[tuple[Started, Path]]]:
    """Start launchers of one rank each; give each with its own folder."""
    meeting = ("launch.nproc_per_node=1", f"launch.rdzv_endpoint=127.0.0.1:{port}")
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            own = shared_outputs(folder, f"machine-{len(list(folder.iterdir()))}")
            command = background(*keys, *meeting, folder=own)
            started.append((stack.enter_context(command), own))
        yield started


@pytest.mark.full
def test_two_of_three_wait_until_they_are_stopped(tmp_path: Path) -> None:
    """Each says how many are missing, and Ctrl-C ends it; nothing is left."""
    keys = (*EQUAL, "launch.nnodes=3")
    with launchers(tmp_path, *keys, port=free_port()) as started:
        for process, folder in started:
            wait_for(lambda path=folder / "stdout": "waiting for 1 of 3 mach" in path.read_text())
            process.send_signal(signal.SIGINT)
        ends = [wait_for_end(process, folder) for process, folder in started]
    assert [end.exit_code for end in ends] == [130, 130]
    assert run_dirs(tmp_path / "outputs") == []


@pytest.mark.full
@pytest.mark.slow  # as root, test_machines.py loses a launcher, and test_restarts.py resumes on two
def test_a_run_of_two_launchers_resumes_after_one_was_killed(tmp_path: Path) -> None:
    """The other one names what it has lost; the resume is the same command for both."""
    port, keys = free_port(), (*EQUAL, "launch.nnodes=2")
    with launchers(tmp_path, *keys, "train.max_steps=1000000", port=port) as started:
        wait_for(lambda: any(checkpoint_steps(run) for run in run_dirs(tmp_path / "outputs")))
        (run,) = run_dirs(tmp_path / "outputs")
        (lost,) = [process for process, folder in started if "run  " not in _printed(folder)]
        lost.kill()
        ends = [wait_for_end(process, folder) for process, folder in started]
    (left,) = [end for end in ends if end.exit_code != -signal.SIGKILL]
    assert "(rank 1) was lost: it was switched off, its launcher was killed" in left.stderr
    assert (left.exit_code, record(run)["status"]) == (1, "failed")
    resume = (f"resume=outputs/{run.parent.name}/{run.name}", "train.max_steps=400")
    with launchers(tmp_path, *resume, "launch.nnodes=2", port=port) as started:
        ends = [wait_for_end(process, folder) for process, folder in started]
    assert [end.exit_code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert_continued(run, num_steps=record(run)["step"])


def _printed(folder: Path) -> str:
    return (folder / "stdout").read_text()
