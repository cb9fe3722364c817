"""Launchers meet like machines, but all on this machine, so the tests need no rights."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import own_trackers
import pytest
from commands import (
    CommandResult,
    Started,
    background,
    free_port,
    rank_processes,
    wait_for,
    wait_for_end,
)
from run_folders import checkpoint_steps, last_step, record, run_dirs
from trainings import EQUAL, assert_continued, shared_outputs

from ddp_runner.launch.stop_requests import ONE_REQUEST_S

# The samples of rank 1 alone are wrong. It notes how often it has looked at them.
ODD_DATA = """
import os
from dataclasses import dataclass
from pathlib import Path
from ddp_runner.data.sources.offline import RandomRegression
from ddp_runner.errors import UserError

@dataclass(frozen=True)
class Odd(RandomRegression):
    def build(self, *args, **keys):
        if os.environ["RANK"] == "1":
            with Path(__file__).with_name("looks").open("a") as looks:
                looks.write("1")
            raise UserError("rank 1 has no data; give it some")
        return super().build(*args, **keys)
"""
ODD = (
    *("allowed_targets=[odd]", "dataset._target_=odd.Odd", "dataset.eval_samples=8"),
    *("dataset.input_size=10", "dataset.target_size=5", "dataset.seed=0"),
)
TWO, ENDLESS = (*EQUAL, "launch.nnodes=2"), "train.max_steps=1000000"


@contextmanager
def launchers(
    folder: Path,
    *keys: str,
    count: int = 2,
    port: int,
    environ: Mapping[str, str | None] | None = None,
) -> Iterator[list[tuple[Started, Path]]]:
    """Start launchers of one rank each; give each with its own folder."""
    meeting = ("launch.nproc_per_node=1", f"launch.rdzv_endpoint=127.0.0.1:{port}")
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            own = shared_outputs(folder, f"machine-{len(list(folder.iterdir()))}")
            command = background(*keys, *meeting, folder=own, environ=environ)
            started.append((stack.enter_context(command), own))
        yield started


def errors(end: CommandResult) -> list[str]:
    """Return a command's error lines, without what torch's C++ says of a store that has gone.

    A command silences that before it imports torch, and a warm one comes too late.
    """
    assert "Traceback" not in end.stderr
    assert "torch/distributed/" not in end.stderr  # a warning of torch's Python
    return [line for line in end.stderr.splitlines() if line.startswith("error: ")]


def saved_run(folder: Path) -> Path:
    """Return the only run once it has a checkpoint."""
    wait_for(lambda: any(checkpoint_steps(run) for run in run_dirs(folder / "outputs")))
    (run,) = run_dirs(folder / "outputs")
    return run


def test_a_machine_may_come_before_the_first_and_a_signal_to_either_saves_both(
    tmp_path: Path,
) -> None:
    """They save the same step; both exit with the code of the signal."""
    port = free_port()
    with (
        launchers(tmp_path, *TWO, ENDLESS, "launch.node_rank=1", count=1, port=port) as second,
        ExitStack() as stack,
    ):
        ((process, folder),) = second
        awaited = f"waiting for 127.0.0.1:{port}, where the 2 machines of the run meet (Conn"
        wait_for(lambda: awaited in _printed(folder))
        keys = (*TWO, ENDLESS, "launch.node_rank=0")
        first = stack.enter_context(launchers(tmp_path, *keys, count=1, port=port))
        run = saved_run(tmp_path)
        process.send_signal(signal.SIGTERM)
        ends = [wait_for_end(*one) for one in (*first, *second)]
    assert [end.exit_code for end in ends] == [143, 143]
    assert [errors(end) for end in ends] == [[], []]
    assert "SIGTERM: finishing the step and saving a checkpoint" in ends[1].stdout
    assert ["run  " in end.stdout for end in ends] == [True, False]  # rank 0 prints it
    assert record(run)["status"] == "preempted"
    assert max(checkpoint_steps(run)) == record(run)["step"] >= last_step(run)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        pytest.param((ODD, ODD), "rank 1 has no data", id="one rank finds it"),
        pytest.param(
            (["seed=1"], ["seed=2"]),
            "launched differently: seed is ",
            id="all do",
            marks=pytest.mark.full,
        ),
    ],
)
def test_each_machine_reports_a_mistake_once_and_restarts_nothing(
    tmp_path: Path, keys: Sequence[Sequence[str]], sentence: str
) -> None:
    """The exit code is 2, although restarts are left."""
    port = free_port()
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "odd.py").write_text(ODD_DATA)
    environ = {"PYTHONPATH": str(odd)}
    with ExitStack() as stack:
        started = []
        for own in keys:
            command = (*TWO, "launch.max_restarts=3", *own)
            block = launchers(tmp_path, *command, count=1, port=port, environ=environ)
            started += stack.enter_context(block)
        ends = [wait_for_end(*one) for one in started]
    assert [end.exit_code for end in ends] == [2, 2]
    for end in ends:
        (error,) = errors(end)
        assert sentence in error
    assert [path.read_text() for path in odd.glob("looks")] == (["1"] if ODD in keys else [])


@pytest.mark.full
def test_a_second_signal_ends_a_machine_at_once_and_marks_the_run(tmp_path: Path) -> None:
    """Its launcher learns the run folder from rank 0, which claims it."""
    with launchers(tmp_path, *TWO, ENDLESS, port=free_port()) as started:
        run = saved_run(tmp_path)
        for each, _ in started:
            for rank in rank_processes(each.pid).values():
                rank.suspend()  # so the step never ends
        ((first, _),) = [one for one in started if "run  " in _printed(one[1])]
        first.send_signal(signal.SIGTERM)
        time.sleep(2 * ONE_REQUEST_S)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 143
        assert record(run)["status"] == "preempted"
        assert record(run)["error"]["sentence"] == "ended without a checkpoint"


@pytest.mark.full
def test_two_of_three_wait_until_they_are_stopped(tmp_path: Path) -> None:
    """Each says how many are missing, and Ctrl-C ends it; nothing is left."""
    with launchers(tmp_path, *EQUAL, "launch.nnodes=3", port=free_port()) as started:
        for _, folder in started:
            wait_for(lambda path=folder / "stdout": "waiting for 1 of 3 mach" in path.read_text())
        for process, _ in started:
            process.send_signal(signal.SIGINT)
        ends = [wait_for_end(process, folder) for process, folder in started]
    assert [(end.exit_code, errors(end)) for end in ends] == [(130, []), (130, [])]
    assert run_dirs(tmp_path / "outputs") == []


@pytest.mark.full
def test_a_machine_that_waits_says_that_the_first_has_ended(tmp_path: Path) -> None:
    """It says so in one line, because the store was there."""
    port, keys = free_port(), (*EQUAL, "launch.nnodes=3")
    with ExitStack() as stack:
        (first, _), (second, folder) = (
            stack.enter_context(
                launchers(tmp_path, *keys, f"launch.node_rank={number}", count=1, port=port)
            )[0]
            for number in (0, 1)
        )
        wait_for(lambda: "waiting for 1 of 3 machines" in (folder / "stdout").read_text())
        first.kill()
        end = wait_for_end(second, folder)
    (error,) = errors(end)
    assert f"127.0.0.1:{port}, where the machines meet, is lost: its machine was" in error
    assert end.exit_code == 2


@pytest.mark.full
@pytest.mark.slow  # as root, test_machines.py loses a launcher, and test_restarts.py resumes on two
def test_a_run_of_two_launchers_resumes_after_one_was_killed(tmp_path: Path) -> None:
    """The other one names what it has lost; the resume is the same command for both."""
    port = free_port()
    with launchers(tmp_path, *TWO, ENDLESS, port=port) as started:
        run = saved_run(tmp_path)
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


@pytest.mark.full
def test_a_run_of_two_launchers_in_a_named_folder_has_its_trackers(tmp_path: Path) -> None:
    """The launcher of rank 0 starts them once the folder is claimed."""
    sent, option = tmp_path / "sent", tmp_path / "conf" / "trackers" / "file.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(f"mine:\n  _target_: own_trackers.Recorder\n  path: {sent}\n")
    keys = (f"--config-dir={tmp_path / 'conf'}", "trackers=file", "allowed_targets=[own_trackers]")
    named, here = f"hydra.run.dir={tmp_path / 'named'}", str(Path(own_trackers.__file__).parent)
    environ = {"PYTHONPATH": here}
    with launchers(tmp_path, *keys, *TWO, named, port=free_port(), environ=environ) as started:
        ends = [wait_for_end(process, folder) for process, folder in started]
    assert [end.exit_code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    calls = sent.read_text()
    assert [calls.count(word) for word in ('"begin"', '"end": "completed"')] == [1, 1]


def _printed(folder: Path) -> str:
    return (folder / "stdout").read_text()
