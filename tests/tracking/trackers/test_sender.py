"""The process of a tracker: whatever it does, the run goes on, and says once what is wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from commands import wait_for
from own_trackers import calls, points
from run_folders import record

from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.trackers import sender
from ddp_runner.tracking.trackers.follower import Request
from ddp_runner.tracking.trackers.sender import TrackerProcess, end_trackers

LINE = '{"step": 1, "epoch": 1, "time_s": 0.5, "train/loss": 0.25}\n'


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., TrackerProcess]:
    """Start the process of one of the trackers in own_trackers.py, for a run with one line."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"name": "x"}))
    (tmp_path / "metrics.jsonl").write_text(LINE)
    write_run_record(tmp_path, started_at=5.0, config_hash="one", warnings=["an earlier one"])

    def hide(text: str) -> str:
        return text.replace("said no", "${oc.env:X}")

    def started(name: str, *, wait_s: float = 60.0, **keys: str) -> TrackerProcess:
        settings = {"_target_": f"own_trackers.{name}", **keys}
        request = Request(
            os.getpid(), "mine", settings, ["own_trackers"], str(tmp_path), None, None, 0.0
        )
        return TrackerProcess(request, wait_s=wait_s, hide=hide)

    return started


def test_it_gets_the_run_and_its_end(start: Callable[..., TrackerProcess], tmp_path: Path) -> None:
    """While the run goes on, too; no warning, and no process is left."""
    path = tmp_path / "calls"
    tracker = start("Recorder", path=str(path))
    wait_for(lambda: points(path) == [(1, "train/loss", 0.25)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(LINE.replace('"step": 1', '"step": 2'))
    wait_for(lambda: len(points(path)) == 2)
    end_trackers([tracker], "preempted")
    assert calls(path)[-1]["end"] == "preempted"
    assert record(tmp_path)["warnings"] == ["an earlier one"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "Raising",
            "trackers.mine failed (RuntimeError: the server ${oc.env:X}); the run goes on, and "
            "what is missing there is sent once it works again",
        ),
        (
            "Worsening",
            "trackers.mine failed (RuntimeError: the server ${oc.env:X}); the run goes on, and "
            "what is missing there is sent once it works again",
        ),
        ("Hanging", "trackers.mine had not ended 0 s after the run, and was stopped"),
        ("Dying", "trackers.mine has ended by itself; the run goes on without it"),
        (
            "Missing",
            "trackers.mine failed (trackers.mine._target_ (own_trackers.Missing) does not exist; "
            "did you mean own_trackers.Raising?); the run goes on, and what is missing there is "
            "sent once it works again",
        ),
    ],
)
def test_a_tracker_that_does_not_work_is_one_warning(
    start: Callable[..., TrackerProcess],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    sentence: str,
) -> None:
    """On the terminal and in run.json, without the secrets in it; the end waits no longer."""
    tracker = start(name, wait_s=0.2 if name in ("Hanging", "Worsening") else 60.0)
    if name != "Hanging":
        wait_for(lambda: len(record(tmp_path)["warnings"]) == 2)
    end_trackers([tracker], "completed")
    assert record(tmp_path)["warnings"] == ["an earlier one", sentence]
    assert capfd.readouterr().out == f"warning: {sentence}\n"


def test_a_run_whose_rank_is_gone_has_failed(
    start: Callable[..., TrackerProcess], tmp_path: Path
) -> None:
    """Its stdin ends without a word."""
    path = tmp_path / "calls"
    tracker = start("Recorder", path=str(path))
    process = tracker._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    wait_for(lambda: calls(path) and "end" in calls(path)[-1])
    assert calls(path)[-1]["end"] == "failed"
    tracker.wait("failed")


@pytest.mark.slow
@pytest.mark.parametrize("last_words", ["", "completed\n"])
def test_a_tracker_that_hangs_ends_after_rank_zero(
    start: Callable[..., TrackerProcess], tmp_path: Path, last_words: str
) -> None:
    """Rank 0 was killed, before or after it could say how the run has ended."""
    code = """
import os, sys
from ddp_runner.tracking.trackers.follower import Request
from ddp_runner.tracking.trackers.sender import _start
settings = {"_target_": "own_trackers.Hanging"}
request = Request(os.getpid(), "x", settings, ["own_trackers"], sys.argv[1], None, None, 0.0)
process = _start(request)
process.stdout.readline()  # it is ready
process.stdin.write(sys.argv[2])
process.stdin.flush()
print(process.pid, flush=True)
os._exit(0)
"""
    end_trackers([start("Recorder", path=str(tmp_path / "calls"))], "failed")  # writes the folder
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path), last_words]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert psutil.pid_exists(int(result.stdout))
    wait_for(lambda: not psutil.pid_exists(int(result.stdout)))


def test_signals_do_not_end_it(start: Callable[..., TrackerProcess], tmp_path: Path) -> None:
    """A scheduler sends them to every process, and the run saves a checkpoint first."""
    path = tmp_path / "calls"
    tracker = start("Recorder", path=str(path))
    wait_for(lambda: points(path))
    assert tracker._process is not None
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(tracker._process.pid, signum)
    time.sleep(0.1)
    end_trackers([tracker], "preempted")
    assert calls(path)[-1]["end"] == "preempted"


def test_a_process_that_cannot_start_is_a_warning(
    start: Callable[..., TrackerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without memory for it."""
    monkeypatch.setattr(sender.sys, "executable", "/none/python")
    end_trackers([start("Recorder", path="x")], "completed")
    assert record(tmp_path)["warnings"][1] == (
        "trackers.mine cannot be started (No such file or directory); the run goes on without it"
    )


def test_what_a_tracker_starts_ends_with_it(
    start: Callable[..., TrackerProcess], tmp_path: Path
) -> None:
    """W&B's client has a service, which a client that is stopped leaves behind."""
    pid_file = tmp_path / "pid"
    tracker = start("Serving", wait_s=0.2, path=str(pid_file))
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    end_trackers([tracker], "completed")
    pid = int(pid_file.read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
