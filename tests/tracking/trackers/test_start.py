"""The process of a tracker: whatever it does, the run goes on, and says once what is wrong."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from commands import wait_for
from configs import resolved
from own_trackers import calls, points

from ddp_runner.config.secrets import Secrets
from ddp_runner.host.processes import children
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.trackers import start_trackers as start_module
from ddp_runner.tracking.trackers.start_trackers import followed

LINE = '{"step": 1, "epoch": 1, "time_s": 0.5, "train/loss": 0.25}\n'
RETRIES = "the run continues, and the tracker retries until it has everything"
LOADED = {"started_at": 5.0, "resume_step": None, "clock": 0.0}


class Followed:
    """A run with one line, which trackers of own_trackers.py follow until it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stack = folder, ExitStack()
        self.pids = list[int]()

    def start(self, *names: str, wait_s: float = 60.0, **keys: str) -> None:
        """Start trackers; the first is `mine`."""
        config, _ = resolved("model=toy", "launch.shutdown_timeout_s=8")
        trackers = {
            f"mine{number or ''}": {"_target_": f"own_trackers.{name}", "wait_s": wait_s, **keys}
            for number, name in enumerate(names)
        }
        config = replace(config, trackers=trackers, allowed_targets=["own_trackers"])
        secrets = Secrets(values={"said no": "${oc.env:X}"})
        job = Job(config, started_at=5.0, provenance={}, secrets=secrets)
        before = children()
        self.stack.enter_context(followed(job, RunDir(self.folder)))
        self.pids = sorted(children() - before)

    def end(self, status: str) -> None:
        """End the run."""
        write_run_record(self.folder, status=status)
        self.stack.close()

    @property
    def log(self) -> str:
        """What `mine` has left in its log."""
        return (self.folder / "logs" / "tracker-mine.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Followed]:
    """Give a run that is alive."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"name": "x"}))
    (tmp_path / "metrics.jsonl").write_text(LINE)
    write_run_record(
        tmp_path, status="running", started_at=5.0, config_hash="one", loaded=LOADED, warnings=[]
    )
    one = Followed(tmp_path)
    yield one
    one.end("completed")
    for pid in filter(psutil.pid_exists, one.pids):
        os.kill(pid, signal.SIGKILL)


def test_it_gets_the_run_and_its_end(
    run: Followed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the run goes on, too; no warning, and no process is left."""
    path = tmp_path / "calls"
    run.start("Recorder", path=str(path))
    wait_for(lambda: points(path) == [(1, "train/loss", 0.25)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(LINE.replace('"step": 1', '"step": 2'))
    wait_for(lambda: len(points(path)) == 2)
    run.end("preempted")
    assert calls(path)[-1]["end"] == "preempted"
    assert (capfd.readouterr().out, run.log) == ("", "")
    assert not any(map(psutil.pid_exists, run.pids))


def test_it_sends_nothing_before_the_session_has_restored_its_state(
    run: Followed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Until then metrics.jsonl is of the session before; a resume that is rejected sends none."""
    path = tmp_path / "calls"
    write_run_record(tmp_path, status="completed", loaded=LOADED | {"started_at": 1.0})
    run.start("Recorder", path=str(path))
    time.sleep(2.0)
    since = time.monotonic()
    run.stack.close()
    assert time.monotonic() - since < 30  # of 60
    assert not path.exists()
    assert capfd.readouterr().out == ""


def test_a_restarted_run_is_followed_from_the_line_where_it_goes_on(
    run: Followed, tmp_path: Path
) -> None:
    """It cuts metrics.jsonl, and computes the same steps again."""
    path, lines = tmp_path / "calls", [LINE.replace(": 1,", f": {n},", 1) for n in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    run.start("Recorder", path=str(path))
    wait_for(lambda: len(points(path)) == 4)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    write_run_record(tmp_path, loaded=LOADED | {"resume_step": 2, "clock": 100.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("".join(lines[2:]))
    wait_for(lambda: len(points(path)) == 5)
    run.end("completed")
    assert [step for step, _, _ in points(path)] == [1, 2, 3, 4, 5]
    assert [one for one in calls(path) if "begin" in one or "end" in one] == [
        calls(path)[0],
        calls(path)[-1],
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raising", f"trackers.mine failed (RuntimeError: the server ${{oc.env:X}}); {RETRIES}"),
        ("Exiting", f"trackers.mine failed (SystemExit: no key); {RETRIES}"),
        (
            "Hanging",
            "trackers.mine had not ended 0 s after the run, and was stopped; python -m "
            "ddp_runner.tracking.track RUN mine sends the rest",
        ),
        (
            "Dying",
            "trackers.mine ended before it had all of the run; python -m "
            "ddp_runner.tracking.track RUN mine sends the rest",
        ),
        (
            "Missing",
            "trackers.mine failed (trackers.mine._target_ (own_trackers.Missing) does not exist; "
            f"did you mean own_trackers.Raising?); {RETRIES}",
        ),
    ],
)
def test_a_tracker_that_does_not_work_is_one_warning(
    run: Followed, capfd: pytest.CaptureFixture[str], name: str, sentence: str
) -> None:
    """On the terminal and in its log, without the secrets in it; the end waits no longer."""
    run.start(name, wait_s=0.2 if name == "Hanging" else 60.0)
    if name not in ("Hanging", "Dying"):
        wait_for(lambda: run.log)
    run.end("completed")
    assert capfd.readouterr().out == f"warning: {sentence}\n"
    assert run.log.splitlines()[0] == sentence


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("to http://me:s3c@r3t@host/api", "to http://…@host/api"),  # a client added /api
        ("x" * 276 + " said no", "x" * 276 + " ${oc.e …"),  # the cut would leave "sai"
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
    ],
)
def test_what_a_server_answers_is_shown_without_secrets_and_escapes(
    run: Followed, capfd: pytest.CaptureFixture[str], text: str, shown: str
) -> None:
    """On the terminal, and with its traceback in the log."""
    run.start("Quoting", text=text)
    wait_for(lambda: "raise ConnectionError(self.text)" in run.log)
    run.end("completed")
    sentence = f"trackers.mine failed (ConnectionError: {shown}); {RETRIES}"
    assert capfd.readouterr().out == f"warning: {sentence}\n"
    assert run.log.startswith(f"{sentence}\n")
    assert not re.search("r3t|said no|\x1b|\x07", run.log)


def numbers(code: str, *arguments: object) -> list[int]:
    """Run a program in a process of its own; return the numbers that it prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return [*map(int, result.stdout.split())]


CLAIMER = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
from configs import resolved
from ddp_runner.host.processes import children
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.trackers.start_trackers import followed
folder, name, path, has_child = sys.argv[1:]
config = replace(
    resolved("model=toy")[0],
    trackers={"x": {"_target_": f"own_trackers.{name}", "path": path}},
    allowed_targets=["own_trackers"],
)
with followed(Job(config, started_at=5.0, provenance={}), RunDir(Path(folder))):
    pids = children()
    while not (os.path.exists(path) and open(path).read()):
        time.sleep(0.1)
    holder = 0
    if has_child and not (holder := os.fork()):
        os.close(1)
        os.close(2)
        time.sleep(600)
    print(*pids, holder, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("run")  # it writes the folder
@pytest.mark.parametrize("status", ["running", "completed"])
def test_a_tracker_that_hangs_ends_after_its_launcher(tmp_path: Path, status: str) -> None:
    """The launcher was killed, before or after the run has ended."""
    path = tmp_path / "pid"
    pid, _ = numbers(CLAIMER, tmp_path, "Serving", path, "")
    write_run_record(tmp_path, status=status)
    assert psutil.pid_exists(pid)
    service = int(path.read_text())
    wait_for(lambda: not psutil.pid_exists(pid) and not psutil.pid_exists(service))


@pytest.mark.full
@pytest.mark.usefixtures("run")  # it writes the folder
def test_a_tracker_sees_that_its_launcher_is_gone_though_a_child_of_it_lives(
    tmp_path: Path,
) -> None:
    """A process that rank 0 has forked, as a loader's worker is: the run has failed."""
    pid, holder = numbers(CLAIMER, tmp_path, "Recorder", tmp_path / "calls", "child")
    try:
        wait_for(lambda: not psutil.pid_exists(pid))
        assert psutil.pid_exists(holder)
    finally:
        os.kill(holder, signal.SIGKILL)
    assert calls(tmp_path / "calls")[-1].get("end") == "failed"


def test_signals_do_not_end_it(run: Followed, tmp_path: Path) -> None:
    """A scheduler sends them to every process, and the run saves a checkpoint first."""
    path = tmp_path / "calls"
    run.start("Recorder", path=str(path))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # from its first moment on
        os.kill(run.pids[0], signum)
    wait_for(lambda: points(path))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(run.pids[0], signum)
    time.sleep(0.1)
    run.end("preempted")
    assert calls(path)[-1]["end"] == "preempted"


def test_a_process_that_cannot_start_is_a_warning(
    run: Followed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The machine has no memory for it."""
    monkeypatch.setattr(start_module.sys, "executable", "/none/python")
    run.start("Recorder", path="x")
    run.end("completed")
    assert capfd.readouterr().out == (
        "warning: trackers.mine cannot be started (No such file or directory); the run continues "
        "without it\n"
    )


@pytest.mark.parametrize("name", ["DyingLast", "Forking"])
def test_a_tracker_that_ends_before_it_is_done_is_a_warning(
    run: Followed, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """The end does not wait for what it leaves."""
    path = tmp_path / "calls"
    run.start(name, path=str(path))
    thread = threading.Thread(target=run.end, args=("completed",), daemon=True)
    thread.start()
    thread.join(60)
    if name == "Forking":
        os.kill(calls(path)[-1]["pid"], signal.SIGKILL)  # no launcher is there to end it
    assert not thread.is_alive()
    is_done = name == "Forking"
    late = "trackers.mine ended before it had all of the run; python -m "
    assert capfd.readouterr().out.startswith("" if is_done else f"warning: {late}")
    assert (run.log == "") == is_done


def test_a_folder_that_cannot_be_used_is_named(
    run: Followed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also in a run that is shorter than the start of the tracker."""
    (tmp_path / "trackers").touch()
    run.start("Recorder", path="x")
    run.end("completed")
    assert capfd.readouterr().out.startswith(
        "warning: trackers.mine failed (FileExistsError: [Errno 17] File exists: "
        f"'{tmp_path}/trackers')"
    )


class Mute:
    """A process that does not end; waiting for it moves the clock."""

    pid, now = 2**30, 0.0

    def __init__(self, *arguments: object, **named: object) -> None: ...

    def wait(self, timeout: float) -> None:
        """Move the clock."""
        Mute.now += timeout
        raise subprocess.TimeoutExpired("mute", timeout)

    returncode = -9


@pytest.mark.parametrize(
    ("status", "most_s", "late"),
    [
        ("completed", 6.0, "had not ended 6 s after the run, and was stopped; "),
        ("preempted", 4.0, "had not ended 4 s after the run, and was stopped; "),
        ("failed", 2.0, "had not ended 2 s after the run, and gets 10 s more"),
    ],
)
def test_several_trackers_share_one_time(
    run: Followed,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    status: str,
    most_s: float,
    late: str,
) -> None:
    """Little for a run that is to stop, and for one that has failed."""
    with monkeypatch.context() as patch:
        patch.setattr(Mute, "now", 0.0)
        patch.setattr(start_module.subprocess, "Popen", Mute)
        patch.setattr(start_module, "LIMIT_S", 0.0)
        patch.setattr(start_module.time, "monotonic", lambda: Mute.now)
        run.start("Hanging", "Hanging", "Hanging", wait_s=6.0)
        run.end(status)
        assert Mute.now == pytest.approx(most_s, abs=0.01)  # a completed run has files to send
    shown = capfd.readouterr().out.splitlines()
    for name, line in zip(("mine", "mine1", "mine2"), shown, strict=True):
        assert line.startswith(f"warning: trackers.{name} {late}")


def test_what_a_tracker_starts_ends_with_it(run: Followed, tmp_path: Path) -> None:
    """W&B's client has a service, which a client that is stopped leaves behind."""
    pid_file = tmp_path / "pid"
    run.start("Serving", wait_s=0.2, path=str(pid_file))
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    run.end("completed")
    pid = int(pid_file.read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
