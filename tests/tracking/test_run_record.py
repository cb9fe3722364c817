"""run.json: it is never half-written, and has the times of each session of a run."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from run_folders import record
from train_states import TOY, compose_config

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job, Outcome
from ddp_runner.tracking import run_record
from ddp_runner.tracking.run_record import (
    end_session,
    forget_earlier_sessions,
    note_startup,
    read_run_record,
    start_session,
    versions,
    write_run_record,
)
from ddp_runner.worker import run_task

AN_HOUR_AGO = time.time() - 3600


def test_a_resumed_run_adds_up_its_sessions(tmp_path: Path) -> None:
    """It began when the first did and took what all took; not the time that it lay still."""
    start_session(tmp_path, started_at=AN_HOUR_AGO, status="running")
    write_run_record(tmp_path, startup_s=1.0)
    first = {"started_at": AN_HOUR_AGO, "startup_s": 1.5, "wall_s": 60.0}
    write_run_record(tmp_path, sessions=[first], wall_s=60.0)
    now = time.time() - 5
    start_session(tmp_path, started_at=now, status="running")
    assert record(tmp_path)["wall_s"] is None, "a run that goes on has not ended"
    start_session(tmp_path, started_at=now, world_size=2)  # the launcher, then rank 0
    note_startup(tmp_path)
    end_session(tmp_path, status="completed")
    fields = record(tmp_path)
    assert (fields["started_at"], fields["startup_s"]) == (AN_HOUR_AGO, 1.5)
    assert fields["sessions"][0] == first
    second = fields["sessions"][1]
    assert second["started_at"] == now
    assert 5 <= second["startup_s"] <= second["wall_s"] < 600
    assert fields["wall_s"] == pytest.approx(60 + second["wall_s"], abs=0.01)
    assert (fields["status"], fields["world_size"], len(fields["sessions"])) == ("completed", 2, 2)


@pytest.mark.parametrize("how", ["killed", "killed before any metrics", "failed"])
def test_a_session_that_left_no_wall_time_ended_when_it_last_wrote(
    tmp_path: Path, how: str
) -> None:
    """At its last line of metrics, else its last run.json; a failure has a time of its own."""
    start_session(tmp_path, started_at=AN_HOUR_AGO)
    if how == "failed":
        write_run_record(tmp_path, status="failed", finished_at=AN_HOUR_AGO + 30)
    if how == "killed":
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        os.utime(tmp_path / "metrics.jsonl", (0, AN_HOUR_AGO + 30))
    if how == "killed before any metrics":
        os.utime(tmp_path / "run.json", (0, AN_HOUR_AGO + 30))
    start_session(tmp_path, started_at=time.time())
    assert record(tmp_path)["sessions"][0]["wall_s"] == pytest.approx(30, abs=0.01)
    end_session(tmp_path)
    assert 30 <= record(tmp_path)["wall_s"] < 600


def test_a_run_that_begins_anew_in_its_folder_forgets_its_earlier_sessions(tmp_path: Path) -> None:
    """What they did is gone with their metrics."""
    start_session(tmp_path, started_at=AN_HOUR_AGO)
    now = time.time()
    start_session(tmp_path, started_at=now)
    forget_earlier_sessions(tmp_path)
    fields = record(tmp_path)
    assert (fields["started_at"], len(fields["sessions"])) == (now, 1)


def session(env: DistEnv, config: Config, run_dir: Path, started_at: float) -> Outcome:
    """Run a rank as a worker does."""
    job = Job(config, started_at=started_at, provenance={"versions": versions()}, run_dir=run_dir)
    return run_task(job, replace(env, launcher="environment"))  # it meets the others at init_method


@pytest.mark.full
def test_a_real_run_that_goes_on_keeps_its_times_load_and_devices(tmp_path: Path) -> None:
    """In run.json, and as its totals in the comparison; the load is that of its last session."""
    run_dir = tmp_path / "run"
    for number, max_steps in enumerate((3, 6)):
        store = f"launch.init_method='{(tmp_path / f'store-{number}').as_uri()}'"
        keys = (*TOY, f"train.max_steps={max_steps}", "train.log_every_steps=1", store)
        config = compose_config(*keys, world_size=2)
        config = replace(config, resume=str(run_dir) if number else None)
        started_at = AN_HOUR_AGO if number == 0 else time.time()
        run_ranks(session, 2, config, run_dir, started_at, backend=None)
    fields = record(run_dir)
    first, second = fields["sessions"]
    assert fields["started_at"] == first["started_at"] == AN_HOUR_AGO
    assert fields["startup_s"] == first["startup_s"] > 3000
    assert second["wall_s"] > second["startup_s"] > 0
    assert fields["wall_s"] == pytest.approx(first["wall_s"] + second["wall_s"], abs=0.01)
    assert fields["num_devices"] == 2
    assert fields["load"]["start"]["loadavg_1m"] >= 0
    assert set(fields["load"]["end"]) == {"loadavg_1m", "busy_share_others", "steal_share"}
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]
    assert max(steps) == 6
    comparison = compare(read_runs([tmp_path]))
    (row,) = comparison.rows
    for name, value in (("wall_s", fields["wall_s"]), ("startup_s", fields["startup_s"])):
        assert row.stats[name].mean == value
    assert row.stats["sessions"].mean == 2
    times, changes = comparison.notes
    assert times.sentence.startswith("resumed: wall s is the sum of its 2 sessions")
    assert changes.sentence.endswith("a resume changed train.max_steps=6 (was 3) at step 3")


def test_run_record_merges_fields(tmp_path: Path) -> None:
    """Later writers add and replace fields; NaN is null; no temporary file stays."""
    write_run_record(tmp_path / "run", status="running", world_size=2)
    write_run_record(tmp_path / "run", status="completed", metrics={"a": math.nan, "b": (1, 2.5)})
    assert read_run_record(tmp_path / "run") == {
        "status": "completed",
        "world_size": 2,
        "metrics": {"a": None, "b": [1, 2.5]},
    }
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_run_record_survives_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old fields are still there when the disk was full."""
    write_run_record(tmp_path, status="running")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match=r"run\.json cannot be written \(No space left"):
            write_run_record(tmp_path, status="completed")
    assert read_run_record(tmp_path) == {"status": "running"}


def test_a_reader_of_the_run_record_sees_whole_files_only(tmp_path: Path) -> None:
    """While a run writes field after field."""
    write_run_record(tmp_path, first=1)

    def write() -> None:
        for number in range(40):
            write_run_record(tmp_path, **{f"field_{number}": number})

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert read_run_record(tmp_path)["first"] == 1
    assert len(read_run_record(tmp_path)) == 41


def test_run_record_keeps_the_fields_of_all_who_write_at_once(tmp_path: Path) -> None:
    """The launchers of several machines may say how a run ended; a reader sees whole files only."""
    write_run_record(tmp_path, first=1)

    def write(writer: int) -> None:
        for number in range(10):
            write_run_record(tmp_path, **{f"writer_{writer}_{number}": number})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read_run_record(tmp_path)["first"] == 1
    assert len(read_run_record(tmp_path)) == 41


@pytest.mark.parametrize("content", [None, "", '{"status": "runn', "[1]"])
def test_a_missing_or_damaged_run_record_is_named(tmp_path: Path, content: str | None) -> None:
    """The answer is one line with the path, never a traceback."""
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path / "run.json")):
        read_run_record(tmp_path)


WRONG = [1, "x", {"a": 1}, [1], [[1]], [{}], [{"started_at": 1}], [{"wall_s": None}]]
NO_TIMES = [{"started_at": 1, "startup_s": 1, "wall_s": "x"}]


@pytest.mark.parametrize("sessions", [*WRONG, NO_TIMES], ids=str)
def test_times_of_no_run_are_named_when_it_is_resumed(sessions: Any, tmp_path: Path) -> None:
    """A run.json of somebody else's may hold anything."""
    fields = {"status": "failed", "sessions": sessions}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"run\.json has invalid times"):
        start_session(tmp_path, started_at=2.0, status="running")
    assert record(tmp_path) == fields


def test_the_record_needs_no_torch() -> None:
    """The launcher reads and writes run.json before torch is imported."""
    code = (
        "import sys, ddp_runner.tracking.run_record as run_record;"
        "run_record.versions();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_versions_name_each_package() -> None:
    """Those of the packages that decide about results."""
    found = versions()
    assert str(torch.__version__).startswith(str(found["torch"]))
    assert found["python"]
    assert set(found) == {"python", "ddp_runner", *run_record.PACKAGES}
