"""``python -m ddp_runner.status``: what it prints, its exit codes, and its imports."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import RUNNER, background, run_command, wait_for, wait_until_gone
from generated_runs import write_run
from rights import unreadable
from run_folders import last_step, run_dirs
from sweeps import planned
from trainings import LONG

from ddp_runner.errors import UserError, duration
from ddp_runner.status import run
from ddp_runner.sweep.survey import folder_time
from ddp_runner.tracking.run_dir import RunDir

STATUS = (*RUNNER[:-1], "ddp_runner.status")
RUNNING = {"status": "running", "sessions": [{"started_at": 1.0}]}


@pytest.mark.full
def test_a_run_is_shown_while_it_lives_and_as_lost_when_it_was_killed(tmp_path: Path) -> None:
    """By the real commands; after its resume has ended it is not shown any more."""

    def shown(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        outputs = str(tmp_path / "outputs")
        end = run_command(outputs, "--json", *arguments, folder=tmp_path / "look", program=STATUS)
        assert end.stderr == ""
        return end.exit_code, json.loads(end.stdout)["runs"]

    (tmp_path / "outputs").mkdir()
    assert shown() == (0, [])
    with background(*LONG, "train.max_steps=100000", folder=tmp_path) as process:
        wait_for(lambda: run_dirs(tmp_path / "outputs"))
        exit_code, (run,) = shown()
        assert exit_code == 0
        assert run["status"] in ("starting", "running")
        wait_for(lambda: last_step(tmp_path / "outputs") >= 3)
        _, (run,) = wait_for(lambda: (now := shown())[1][0]["status"] == "running" and now)
        assert run["total_steps"] == 100_000
        assert run["step"] >= 3
        assert run["samples_per_s"] > 0
        assert run["left_s"] > 0
        assert (run["num_ranks"], run["hosts"]) == (2, [os.uname().nodename])
        process.send_signal(signal.SIGKILL)
        wait_until_gone(process)
    exit_code, (run,) = shown()
    assert (exit_code, run["status"]) == (1, "lost")
    assert f"process {process.pid} on " in run["reason"]
    (run_dir,) = run_dirs(tmp_path / "outputs")
    resumed = run_command(f"resume={run_dir}", "train.max_steps=30", folder=tmp_path)
    assert resumed.exit_code == 0, resumed.stderr
    assert shown() == (0, [])
    _, (run,) = shown("--all")
    assert run["status"] == "completed"
    assert not (run_dir / ".heartbeat").exists()


def test_ended_runs_are_counted_and_shown_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that failed, with the reason."""
    write_run(tmp_path / "good")
    failed = {"status": "failed", "error": {"sentence": "rank 1\x1b was killed"}, "restarts": 2}
    failed["tags"] = ["baseline", "lr"]
    write_run(tmp_path / "bad", record=failed)
    assert run([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no run is alive here",
        "2 runs ended or not started: --all shows them",
    ]
    assert run([str(tmp_path), "--all"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'bad'}",
        "    failed     step 0  epoch 2",
        "    1 rank on here, 2 restarts, tags: baseline lr",
        "    rank 1\\x1b was killed",
        f"{tmp_path / 'good'}",
        "    completed  step 0  epoch 2",
        "    1 rank on here",
    ]


def test_a_sweep_shows_how_its_jobs_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that nobody runs any more is lost; one in a folder of its own is looked at once."""
    sweep = tmp_path / "sweep"
    planned(sweep, "seed=1", "seed=2", "seed=3")
    planned(tmp_path / "done", "seed=1")
    write_run(sweep / "seed=1")
    write_run(sweep / "seed=2", record=RUNNING)
    write_run(tmp_path / "done" / "seed=1")
    (sweep / "seed=2" / ".lock.holder").write_text(f"process 7 on {os.uname().nodename}")
    assert run([str(tmp_path), str(sweep)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [str(sweep), "    sweep      3 jobs: 1 lost, 1 queued, 1 completed"]
    assert [line for line in lines if "done" in line] == []
    name = os.uname().nodename
    assert f"    process 7 on {name} is gone; give the sweep's command again" in lines
    assert "2 runs ended or not started: --all shows them" in lines
    run([str(tmp_path), "--all", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert len(report["runs"]) == 3
    assert {Path(one["folder"]).name: one["counts"] for one in report["sweeps"]} == {
        "done": {"completed": 1},
        "sweep": {"completed": 1, "lost": 1, "queued": 1},
    }
    (sweep / "sweep.json").write_text("{")
    run([str(tmp_path)])
    assert "sweep.json is damaged" in " ".join(capsys.readouterr().out.split())


def test_a_job_that_begins_right_now_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no run.json yet, and somebody holds its folder; or it is seen by its heartbeat."""

    def shown() -> str:
        assert run([str(tmp_path)]) == 0
        return capsys.readouterr().out.splitlines()[1].strip()

    planned(tmp_path, "a", "b")
    assert run([str(tmp_path), "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "    sweep      2 jobs: 2 queued",
        "no run has begun",
    ]
    with RunDir(tmp_path / "a").locked():
        assert shown() == "sweep      2 jobs: 1 running, 1 queued"
    write_run(tmp_path / "b", record=RUNNING)
    (tmp_path / "b" / ".lock.holder").write_text("process 7 on elsewhere")
    assert shown() == "sweep      2 jobs: 1 running, 1 queued"


def test_no_line_is_wider_than_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except a path, which can be copied whole."""
    failed = {"status": "failed", "error": {"sentence": "word " * 50}, "hosts": ["n" * 20] * 9}
    write_run(tmp_path / "run", record=failed)
    run([str(tmp_path), "--all"])
    path, *lines = capsys.readouterr().out.splitlines()
    assert path == str(tmp_path / "run")
    assert max(map(len, lines)) <= 80
    assert "6 more" in " ".join(lines)


@pytest.mark.parametrize("named", ["", "private", "private/below"])
def test_a_folder_that_cannot_be_read_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    """It may hold a run that is alive: nobody can tell."""
    write_run(tmp_path / "private" / "below")
    folder = tmp_path / (named or "private")
    with unreadable(tmp_path / "private"):
        assert run([str(tmp_path / named)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}",
        "    unreadable",
        "    the folder cannot be read (Permission denied)",
    ]


def test_a_path_that_is_not_there_is_a_mistake_in_one_line() -> None:
    """With exit code 2, as in all commands."""
    sentence = "nowhere is not a folder; give the folder of a run, of a sweep, or of all outputs"
    with pytest.raises(UserError, match=re.escape(sentence)):
        run(["nowhere"])


def test_a_thousand_runs_are_read_without_a_slow_import(tmp_path: Path) -> None:
    """Neither torch nor Hydra, nor what only redrawing needs."""
    for number in range(5):
        write_run(tmp_path / str(number))
    program = (
        "import sys; from ddp_runner.status import run; run(sys.argv[1:]); "
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), "--all"]
    end = subprocess.run(command, capture_output=True, text=True, check=True)
    assert end.stdout.count("completed") == 5
    slow = {"torch", "hydra", "omegaconf", "rich", "tensorboard", "numpy", "matplotlib"}
    assert not set(end.stderr.split()) & slow


def test_the_time_of_a_folder_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left there; where nothing can be written, it is this machine's time."""
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert folder_time(tmp_path) == pytest.approx(tmp_path.stat().st_mtime, abs=3600)
    assert list(tmp_path.iterdir()) == []
    assert folder_time(tmp_path / "gone") == 5.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90061, "1 d 1 h")],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    """What a reader needs."""
    assert duration(seconds) == text
