"""``.heartbeat``: it is renewed while the run lasts, says what rank 0 does, and never fails it."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import TIME_LIMIT_S, wait_for
from configs import freeze, resolved

from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking import alive
from ddp_runner.tracking.alive import Heartbeat, read_heartbeat
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import RunLogger
from ddp_runner.tracking.run_record import start_session


def fields(path: Path) -> dict[str, Any]:
    """Return a heartbeat's fields; none before the first beat."""
    return read_heartbeat(path)[0]


def beat_at(path: Path) -> float:
    """Return the time of a heartbeat; 0.0 before the first one."""
    return read_heartbeat(path)[1] or 0.0


def test_a_heartbeat_follows_the_run_and_goes_with_it(tmp_path: Path) -> None:
    """What begins is shown long before the next usual beat, and the file ends with the block."""
    path = tmp_path / ".heartbeat"
    own = Heartbeat()
    own.total_steps = 9
    with own.beating(path, started_at=12.5):
        wait_for(lambda: fields(path).get("doing") == "starting")
        assert (fields(path)["pid"], fields(path)["started_at"]) == (os.getpid(), 12.5)
        own.step_done(3, epoch=1)
        wait_for(lambda: fields(path)["doing"] == "running")
        assert (fields(path)["step"], fields(path)["total_steps"]) == (3, 9)
        own.note("evaluating")
        wait_for(lambda: fields(path)["doing"] == "evaluating")
        assert fields(path)["step"] == 3
    assert list(tmp_path.iterdir()) == []


class LateEvent(threading.Event):
    """An event that is cleared for the second time only after it was set once more."""

    def __init__(self) -> None:
        super().__init__()
        self.num_clears, self.num_waits, self.is_late = 0, 0, threading.Event()

    def clear(self) -> None:
        """Let the test go on before the second time."""
        self.num_clears += 1
        if self.num_clears == 2:
            self.is_late.set()
            super().wait(TIME_LIMIT_S)
        super().clear()

    def wait(self, timeout: float | None = None) -> bool:
        """Count the waits."""
        self.num_waits += 1
        return super().wait(timeout)


def test_a_run_that_ends_just_before_a_beat_waits_for_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of the run would take the seconds between two beats longer."""
    monkeypatch.setattr(alive, "BEAT_S", 0.2)
    monkeypatch.setattr(alive, "LEAST_S", 0.01)
    late = LateEvent()
    with Heartbeat(_has_changed=late).beating(tmp_path / ".heartbeat", started_at=0.0):
        assert late.is_late.wait(TIME_LIMIT_S)
    assert late.num_waits == 1


def test_a_heartbeat_is_renewed_while_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age and how long the step already takes are two things."""
    monkeypatch.setattr(alive, "BEAT_S", 0.01)
    monkeypatch.setattr(alive, "LEAST_S", 0.01)
    path = tmp_path / ".heartbeat"
    with Heartbeat().beating(path, started_at=0.0):
        first = wait_for(lambda: beat_at(path))
        wait_for(lambda: beat_at(path) > first)
        wait_for(lambda: fields(path).get("idle_s", 0.0) > 0)


@pytest.mark.parametrize("fault", ["full disk", "folder is gone"])
def test_a_heartbeat_that_cannot_be_written_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The text stays as it was; the run itself will say so, at its next line of metrics."""
    tried, path = threading.Event(), tmp_path / ".heartbeat"

    def fail(*_: object) -> int:
        tried.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    path.write_text('{"doing": "before"}')
    monkeypatch.setattr(alive.os, "write" if fault == "full disk" else "open", fail)
    with Heartbeat().beating(path, started_at=0.0):
        assert tried.wait(TIME_LIMIT_S)
        assert json.loads(path.read_text()) == {"doing": "before"}


def test_on_a_full_disk_the_time_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no locks are, only the time tells another launcher that the run is alive."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / ".heartbeat"
    path.write_text("{}")
    os.utime(path, (1.0, 1.0))
    monkeypatch.setattr(alive.os, "write", fail)
    with Heartbeat().beating(path, started_at=0.0):
        wait_for(lambda: (read_heartbeat(path) or ({}, 0.0))[1] > 1.0)


@pytest.mark.parametrize("text", ["", "[1]", '{"doing": ', "\x00" * 20])
def test_a_damaged_heartbeat_still_has_its_time(tmp_path: Path, text: str) -> None:
    """A kill or a full disk may leave anything."""
    path = tmp_path / ".heartbeat"
    path.write_text(text)
    os.utime(path, (7.0, 7.0))
    assert read_heartbeat(path) == ({}, 7.0)


def test_a_heartbeat_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """In one line, with its path."""
    with pytest.raises(UserError, match=rf"{tmp_path} cannot be read \(Is a directory\)"):
        read_heartbeat(tmp_path)
    assert read_heartbeat(tmp_path / "none") == ({}, None)


def test_the_logger_of_a_run_notes_how_far_it_is(tmp_path: Path) -> None:
    """From the step of the checkpoint on; an evaluation lasts until the next step."""
    job, own = Job(resolved("model=toy")[0], started_at=0.0, provenance={}), Heartbeat()
    freeze(tmp_path, job.config)
    start_session(tmp_path, started_at=0.0)
    with RunLogger(
        RunDir(tmp_path), job=job, heartbeat=own, max_steps=9, total_epochs=3, resume_step=4
    ) as logger:
        seen = [(own.doing, own.step, own.total_steps, own.total_epochs)]
        for call in (lambda: logger.step_done(step=5, epoch=2), logger.evaluating):
            call()
            seen.append((own.doing, own.step, own.total_steps, own.epoch))
        logger.finish("completed", step=5, epoch=2)
    assert seen == [("starting", 4, 9, 3), ("running", 5, 9, 2), ("evaluating", 5, 9, 2)]


def test_a_status_of_another_type_is_damage(tmp_path: Path) -> None:
    """As any program may have written it."""
    (tmp_path / "run.json").write_text(json.dumps({"status": []}))
    assert alive.standing(RunDir(tmp_path)).status == alive.DAMAGED
