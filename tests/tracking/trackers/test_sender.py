"""The process of a tracker: whatever it does, the run goes on, and says once what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import psutil
import pytest
import yaml
from commands import wait_for
from configs import resolved
from own_trackers import calls, points
from run_folders import record

from ddp_runner.job import Job
from ddp_runner.tracking import run_logger
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import RunLogger
from ddp_runner.tracking.run_record import begin_session, write_run_record
from ddp_runner.tracking.trackers import sender
from ddp_runner.tracking.trackers.follower import Request
from ddp_runner.tracking.trackers.sender import TrackerProcess, end_trackers

LINE = '{"step": 1, "epoch": 1, "time_s": 0.5, "train/loss": 0.25}\n'


def end(trackers: Sequence[TrackerProcess], status: str) -> None:
    """End them, as a run does that nobody waits for."""
    end_trackers(trackers, status, shutdown_timeout_s=600.0)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., TrackerProcess]:
    """Start the process of one of the trackers in own_trackers.py, for a run with one line."""
    (tmp_path / ".hydra").mkdir(exist_ok=True)
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
    end([tracker], "preempted")
    assert calls(path)[-1]["end"] == "preempted"
    assert record(tmp_path)["warnings"] == ["an earlier one"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "Raising",
            "trackers.mine failed (RuntimeError: the server ${oc.env:X}); the run goes on, and "
            "what is missing there is tried again until it works",
        ),
        (
            "Exiting",
            "trackers.mine failed (SystemExit: no key); the run goes on, and what is missing there "
            "is tried again until it works",
        ),
        (
            "Worsening",
            "trackers.mine failed (RuntimeError: the server ${oc.env:X}); the run goes on, and "
            "what is missing there is tried again until it works",
        ),
        ("Hanging", "trackers.mine had not ended 0 s after the run, and was stopped"),
        ("Dying", "trackers.mine has ended by itself; the run goes on without it"),
        (
            "Missing",
            "trackers.mine failed (trackers.mine._target_ (own_trackers.Missing) does not exist; "
            "did you mean own_trackers.Raising?); the run goes on, and what is missing there is "
            "tried again until it works",
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
    end([tracker], "completed")
    assert record(tmp_path)["warnings"] == ["an earlier one", sentence]
    assert capfd.readouterr().out == f"warning: {sentence}\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("to http://me:s3c@r3t@host/api", "to http://…@host/api"),  # a client added /api
        ("x" * 276 + " said no", "x" * 276 + " ${oc.e …"),  # the cut would leave "sai"
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
    ],
)
def test_what_a_server_answers_is_shown_without_secrets_and_escapes(
    start: Callable[..., TrackerProcess],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    text: str,
    shown: str,
) -> None:
    """On the terminal, in run.json, and with its traceback in the log."""
    with caplog.at_level("INFO", logger="ddp_runner"):
        end([start("Quoting", text=text)], "completed")
    sentence = (
        f"trackers.mine failed (ConnectionError: {shown}); the run goes on, and what is missing "
        "there is tried again until it works"
    )
    assert record(tmp_path)["warnings"] == ["an earlier one", sentence]
    assert capfd.readouterr().out == f"warning: {sentence}\n"
    assert "raise ConnectionError(self.text)" in caplog.text
    assert not re.search("r3t|said no|\x1b|\x07", caplog.text)


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
    tracker.wait("failed", since=time.monotonic(), most_s=60.0)


def numbers(code: str, *arguments: object) -> list[int]:
    """Run a program in a process of its own; return the numbers that it prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return [*map(int, result.stdout.split())]


@pytest.mark.slow
@pytest.mark.parametrize("last_words", ["", "completed\n"])
def test_a_tracker_that_hangs_ends_after_rank_zero(
    start: Callable[..., TrackerProcess], tmp_path: Path, last_words: str
) -> None:
    """Rank 0 was killed, before or after it could say how the run has ended."""
    code = """
import os, sys, time
from ddp_runner.tracking.trackers.follower import Request
from ddp_runner.tracking.trackers.sender import _start
settings = {"_target_": "own_trackers.Serving", "path": sys.argv[3]}
request = Request(os.getpid(), "x", settings, ["own_trackers"], sys.argv[1], None, None, 0.0)
process = _start(request)
while not (os.path.exists(sys.argv[3]) and open(sys.argv[3]).read()):
    time.sleep(0.1)
process.stdin.write(sys.argv[2])
process.stdin.flush()
print(process.pid, flush=True)
os._exit(0)
"""
    end([start("Recorder", path=str(tmp_path / "calls"))], "failed")  # writes the folder
    (pid,) = numbers(code, tmp_path, last_words, tmp_path / "pid")
    assert psutil.pid_exists(pid)
    service = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) and not psutil.pid_exists(service))


@pytest.mark.full
@pytest.mark.usefixtures("start")  # it writes the folder
def test_a_tracker_sees_that_rank_zero_is_gone_though_its_stdin_stays_open(tmp_path: Path) -> None:
    """A process that rank 0 has forked, as a loader's worker is, holds the other end."""
    code = """
import os, sys, time
from ddp_runner.tracking.trackers.follower import Request
from ddp_runner.tracking.trackers.sender import _start
settings = {"_target_": "own_trackers.Recorder", "path": sys.argv[2]}
request = Request(os.getpid(), "x", settings, ["own_trackers"], sys.argv[1], None, None, 0.0)
process = _start(request)
holder = os.fork()
if holder == 0:
    os.close(1)
    os.close(2)
    time.sleep(600)
print(process.pid, holder, flush=True)
os._exit(0)
"""
    pid, holder = numbers(code, tmp_path, tmp_path / "calls")
    try:
        wait_for(lambda: not psutil.pid_exists(pid))
        assert psutil.pid_exists(holder)
    finally:
        os.kill(holder, signal.SIGKILL)
    assert calls(tmp_path / "calls")[-1].get("end") == "failed"


def test_signals_do_not_end_it(start: Callable[..., TrackerProcess], tmp_path: Path) -> None:
    """A scheduler sends them to every process, and the run saves a checkpoint first."""
    path = tmp_path / "calls"
    tracker = start("Recorder", path=str(path))
    wait_for(lambda: points(path))
    assert tracker._process is not None
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(tracker._process.pid, signum)
    time.sleep(0.1)
    end([tracker], "preempted")
    assert calls(path)[-1]["end"] == "preempted"


def test_a_process_that_cannot_start_is_a_warning(
    start: Callable[..., TrackerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without memory for it."""
    monkeypatch.setattr(sender.sys, "executable", "/none/python")
    end([start("Recorder", path="x")], "completed")
    assert record(tmp_path)["warnings"][1] == (
        "trackers.mine cannot be started (No such file or directory); the run goes on without it"
    )


@pytest.mark.parametrize("name", ["DyingLast", "Forking"])
def test_a_tracker_that_ends_before_it_is_done_is_a_warning(
    start: Callable[..., TrackerProcess], tmp_path: Path, name: str
) -> None:
    """The end does not wait for what it leaves, which holds its pipes."""
    path = tmp_path / "calls"
    thread = threading.Thread(target=end, args=([start(name, path=str(path))], "completed"))
    thread.daemon = True
    thread.start()
    thread.join(60)
    if name == "Forking":
        os.kill(calls(path)[-1]["pid"], signal.SIGKILL)  # no launcher is there to end it
    assert not thread.is_alive()
    is_done = name == "Forking"
    assert json.loads((tmp_path / "trackers" / "mine.json").read_text())["is_complete"] == is_done
    warnings = [
        "an earlier one",
        "trackers.mine has ended before it had all of the run; resume=RUN trackers=… sends it",
    ]
    assert record(tmp_path)["warnings"] == warnings[: 1 if is_done else 2]


def test_a_folder_that_cannot_be_used_is_named(
    start: Callable[..., TrackerProcess], tmp_path: Path
) -> None:
    """Also in a run that is shorter than the start of the tracker."""
    (tmp_path / "trackers").touch()
    end([start("Recorder", path="x")], "completed")
    assert record(tmp_path)["warnings"][1].startswith(
        f"trackers.mine failed (FileExistsError: [Errno 17] File exists: '{tmp_path}/trackers')"
    )


class Mute:
    """A process that does not end; waiting for it moves the clock."""

    pid, stdin, now = 2**30, None, 0.0

    def __init__(self, stdout: TextIO) -> None:
        self.stdout = stdout

    def wait(self, timeout: float) -> None:
        """Move the clock."""
        Mute.now += timeout
        raise subprocess.TimeoutExpired("mute", timeout)


@pytest.mark.parametrize(
    ("status", "most_s", "late"),
    [
        ("completed", 6.0, "had not ended 6 s after the run, and was stopped"),
        ("preempted", 4.0, "had not ended 4 s after the run, and was stopped"),
        ("failed", 2.0, "had not ended 2 s after the run, and gets 10 s more"),
    ],
)
def test_several_trackers_share_one_time(
    start: Callable[..., TrackerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    most_s: float,
    late: str,
) -> None:
    """Less than the launcher gives a run that is to stop, and little before the error of a run."""
    reader, writer = os.pipe()
    monkeypatch.setattr(Mute, "now", 0.0)
    monkeypatch.setattr(sender, "_start", lambda request: Mute(os.fdopen(os.dup(reader))))
    monkeypatch.setattr(sender, "LIMIT_S", 0.0)
    monkeypatch.setattr(sender.time, "monotonic", lambda: Mute.now)
    trackers = [start("Hanging", wait_s=6.0) for _ in range(3)]
    end_trackers(trackers, status, shutdown_timeout_s=8.0)
    os.close(writer)
    os.close(reader)
    assert Mute.now == pytest.approx(most_s, abs=0.01)  # a completed run has files to send
    assert record(tmp_path)["warnings"][1:] == 3 * [f"trackers.mine {late}"]


def test_a_run_ends_its_trackers_in_the_time_of_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it ends."""
    seen = list[tuple[str, float]]()
    monkeypatch.setattr(
        run_logger,
        "end_trackers",
        lambda trackers, status, *, shutdown_timeout_s: seen.append((status, shutdown_timeout_s)),
    )
    (tmp_path / ".hydra").mkdir()
    for name in ("config", "overrides"):
        (tmp_path / ".hydra" / f"{name}.yaml").write_text("{}")
    config, _ = resolved("model=toy", "launch.shutdown_timeout_s=7")
    job = Job(config, started_at=0.0, code={})
    begin_session(tmp_path, started_at=0.0)
    with RunLogger(RunDir(tmp_path), job=job, started_at=0.0) as logger:
        logger.finish("preempted")
    with pytest.raises(ZeroDivisionError), RunLogger(RunDir(tmp_path), job=job, started_at=0.0):
        raise ZeroDivisionError
    assert seen == [("preempted", 7.0), ("failed", 7.0)]


def test_what_a_tracker_starts_ends_with_it(
    start: Callable[..., TrackerProcess], tmp_path: Path
) -> None:
    """W&B's client has a service, which a client that is stopped leaves behind."""
    pid_file = tmp_path / "pid"
    tracker = start("Serving", wait_s=0.2, path=str(pid_file))
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    end([tracker], "completed")
    pid = int(pid_file.read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
