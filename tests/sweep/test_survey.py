"""A run's status follows from its record, lock and heartbeat, on any machine."""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from generated_runs import lines_of, write_run

from ddp_runner.sweep.survey import RunStatus, run_status
from ddp_runner.tracking.run_dir import RunDir

HERE = socket.gethostname()
STARTED = 1000.0
ALIVE = {"status": "running", "sessions": [{"started_at": STARTED}], "hosts": ["n1", "n2"]}


def write_beat(run_dir: Path, *, age_s: float, **fields: Any) -> None:
    """Write a heartbeat that is so old, as rank 0 leaves it."""
    content = {"host": HERE, "pid": 1, "started_at": STARTED, "doing": "running", "idle_s": 0.0}
    (run_dir / ".heartbeat").write_text(json.dumps(content | fields))
    age_all(run_dir, age_s)


def age_all(run_dir: Path, age_s: float) -> None:
    """Make all files of a run so old."""
    for path in run_dir.iterdir():
        os.utime(path, (time.time() - age_s,) * 2)


def status_of(run_dir: Path, *, is_held: bool, server_ahead_s: float = 0.0) -> RunStatus:
    """Return the status while this process holds the run's lock, or nobody does."""
    with RunDir(run_dir).locked() if is_held else nullcontext():
        if is_held:  # since long before the last beat
            os.utime(run_dir / ".lock.holder", (0.0, 0.0))
        return run_status(run_dir, server_time=lambda: time.time() + server_ahead_s)


@pytest.mark.parametrize(
    ("host", "is_held", "age_s", "status"),
    [
        (HERE, True, 1.0, "evaluating"),
        (HERE, True, 90.0, "silent"),  # suspended
        (HERE, False, 1.0, "lost"),  # killed a moment ago: the lock is exact
        ("elsewhere", False, 1.0, "evaluating"),  # the lock of another machine is not visible
        ("elsewhere", False, 90.0, "lost"),
        ("elsewhere", True, 1.0, "evaluating"),  # visible by NFS
    ],
)
def test_a_run_is_alive_by_its_lock_here_and_by_its_heartbeat_elsewhere(
    tmp_path: Path, host: str, is_held: bool, age_s: float, status: str
) -> None:
    """What rank 0 does is shown only if a process still does it."""
    run_dir = write_run(tmp_path / "run", record=ALIVE)
    write_beat(run_dir, age_s=age_s, host=host, doing="evaluating")
    run = status_of(run_dir, is_held=is_held)
    assert (run.status, run.hosts) == (status, ("n1", "n2"))
    assert run.is_shown
    assert run.is_missing == (status in ("lost", "silent"))


@pytest.mark.parametrize(("ahead_s", "status"), [(0.0, "running"), (3600.0, "lost")])
def test_the_age_is_by_the_clock_of_the_disk(tmp_path: Path, ahead_s: float, status: str) -> None:
    """Machines with other clocks see the same."""
    run_dir = write_run(tmp_path / "run", record=ALIVE)
    write_beat(run_dir, age_s=0.0, host="elsewhere")
    run = status_of(run_dir, is_held=False, server_ahead_s=ahead_s)
    assert run.status == status
    assert run.seen_s == pytest.approx(ahead_s, abs=60)


def test_a_run_that_starts_has_no_heartbeat_yet(tmp_path: Path) -> None:
    """An old one is of a session that was killed. Importing torch may take minutes."""
    run_dir = write_run(tmp_path / "run", record=ALIVE)
    write_beat(run_dir, age_s=200.0, started_at=STARTED - 1)
    os.utime(run_dir / ".heartbeat", (time.time() - 300.0,) * 2)
    assert status_of(run_dir, is_held=True).status == "starting"
    (run_dir / ".lock.holder").write_text("process 12 on elsewhere")
    assert status_of(run_dir, is_held=False).status == "starting"
    age_all(run_dir, 400.0)
    assert status_of(run_dir, is_held=False).status == "lost"


@pytest.mark.parametrize("status", ["failed", "preempted", "running", "completed"])
def test_a_run_that_is_resumed_starts_before_its_record_says_so(
    tmp_path: Path, status: str
) -> None:
    """run.json stays as it was until the state is restored: the resume may still be rejected."""
    run_dir = write_run(tmp_path / "run", record={**ALIVE, "status": status})
    write_beat(run_dir, age_s=400.0)
    with RunDir(run_dir).locked():  # by the launcher; rank 0 is not there yet
        assert run_status(run_dir).status == "starting"
        write_beat(run_dir, age_s=0.0, started_at=STARTED + 500, doing="starting")
        age_all(run_dir, 10.0)
        for name in (".lock.holder", ".heartbeat"):
            os.utime(run_dir / name)
        assert run_status(run_dir).status == "starting"


def test_a_run_that_has_ended_and_is_still_held_has_ended(tmp_path: Path) -> None:
    """Its launcher waits for trackers; and where no lock is seen, rank 0 has beaten since."""
    run_dir = write_run(tmp_path / "run", record={**ALIVE, "status": "completed"})
    write_beat(run_dir, age_s=0.0, doing="ending")
    assert status_of(run_dir, is_held=True).status == "completed"
    write_beat(run_dir, age_s=0.0, doing="ending", host="elsewhere")
    assert status_of(run_dir, is_held=False).status == "completed"


@pytest.mark.parametrize(
    ("host", "age_s", "expected"),
    [("elsewhere", 1.0, "starting"), ("elsewhere", 90.0, "failed"), (HERE, 1.0, "failed")],
)
def test_a_resume_elsewhere_is_seen_by_its_heartbeat(
    tmp_path: Path, host: str, age_s: float, expected: str
) -> None:
    """Once it is gone, the run is what it was."""
    run_dir = write_run(tmp_path / "run", record={**ALIVE, "status": "failed"})
    write_beat(run_dir, age_s=age_s, started_at=STARTED + 500, host=host, doing="starting")
    os.utime(run_dir / "run.json", (time.time() - 400.0,) * 2)
    assert status_of(run_dir, is_held=False).status == expected


def test_a_lost_run_names_who_held_it_and_the_way_on(tmp_path: Path) -> None:
    """The killed process has left its lock file behind."""
    run_dir = write_run(tmp_path / "run", record=ALIVE)
    (run_dir / ".lock.holder").write_text(f"process 4711 on {HERE}")
    reason = run_status(run_dir).reason
    assert reason == f"process 4711 on {HERE} is gone; continue with resume={run_dir}"


def test_step_rate_and_time_left_are_those_of_the_last_lines(tmp_path: Path) -> None:
    """The last twenty lines count, as a run may get slower. A heartbeat may be older."""
    early = [{**line, "time_s": line["time_s"] / 1000} for line in lines_of([500.0] * 100)]
    late = [{**line, "step": line["step"] + 1000} for line in lines_of([60.0] * 29 + [70.0])]
    lines = early + late
    run_dir = write_run(tmp_path / "run", record=ALIVE, lines=lines)
    write_beat(run_dir, age_s=0.0, step=25, total_steps=1400, epoch=2, total_epochs=4)
    run = status_of(run_dir, is_held=True)
    assert (run.step, run.total_steps, run.epoch, run.total_epochs) == (1300, 1400, 1, 4)
    assert (run.samples_per_s, run.steps_per_s) == (70.0, 10.0)
    assert run.left_s == pytest.approx(10.0)


def test_metrics_that_are_cut_off_or_damaged_count_as_far_as_they_go(tmp_path: Path) -> None:
    """A long file is read from its end only, so its first line there is half."""
    run_dir = write_run(tmp_path / "run", record=ALIVE, lines=lines_of([100.0] * 500))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": "x", "time_s": 1}\n[1]\n{"step": 6000, "ti')
    run = status_of(run_dir, is_held=True)
    assert (run.step, run.steps_per_s) == (5000, 10.0)


@pytest.mark.parametrize(("doing", "says"), [("running", True), ("evaluating", False)])
def test_a_step_that_does_not_end_is_mentioned(tmp_path: Path, doing: str, says: bool) -> None:
    """Rank 0 beats while it waits for another rank. An evaluation may take long."""
    run_dir = write_run(tmp_path / "run", record=ALIVE, lines=lines_of([100.0] * 3))
    write_beat(run_dir, age_s=0.0, idle_s=300.0, doing=doing)
    run = status_of(run_dir, is_held=True)
    assert run.status == doing
    assert ("no step for 300 s" in (run.reason or "")) == says


def test_a_failed_run_has_the_step_of_its_last_line(tmp_path: Path) -> None:
    """run.json has a step only if the run ended well."""
    record = {"status": "failed", "step": None, "epoch": None}
    run = run_status(write_run(tmp_path / "run", record=record, lines=lines_of([100.0] * 3)))
    assert (run.step, run.epoch) == (30, 1)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"status": "failed", "error": {"sentence": "rank 1 was killed"}}, "rank 1 was killed"),
        ({"status": "completed", "stopped_early": "eval/loss got worse"}, "eval/loss got worse"),
        ({"status": "completed"}, None),
        ({"status": "preempted"}, "stopped after a checkpoint; continue with resume={folder}"),
    ],
)
def test_an_ended_run_says_why_it_ended(
    tmp_path: Path, record: Mapping[str, Any], reason: str | None
) -> None:
    """It is listed only with --all."""
    run_dir = write_run(tmp_path / "run", record=record)
    run = run_status(run_dir)
    assert run.reason == (reason and reason.format(folder=run_dir))
    assert (run.status, run.is_shown, run.is_missing) == (record["status"], False, False)


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        json.dumps({"status": "running", "sessions": 3, "hosts": 3, "restarts": "x", "task": 1}),
        json.dumps({"status": "running", "sessions": [3], "world_size": None}),
        json.dumps({"status": 3, "hosts": 5, "error": []}),
    ],
)
def test_a_damaged_record_is_a_line_not_a_traceback(tmp_path: Path, record: str) -> None:
    """Another version, or another program, may have written it."""
    run_dir = write_run(tmp_path / "run")
    (run_dir / "run.json").write_text(record)
    write_beat(run_dir, age_s=0.0, started_at=None, step="x", total_steps=[], idle_s="x")
    assert run_status(run_dir).status
