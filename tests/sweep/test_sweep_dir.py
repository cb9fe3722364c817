"""The plan of a sweep: its jobs, their folders, and what is left of them."""

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sweeps import planned, statuses

from ddp_runner.errors import UserError
from ddp_runner.files import locked
from ddp_runner.sweep.sweep_dir import (
    PLAN,
    Plan,
    PlannedJob,
    change_plan,
    read_plan,
    restarted,
    unfinished_sweep,
    with_fault,
    with_jobs,
)
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import end_session, start_session, write_run_record


def test_each_job_has_a_folder_of_its_own() -> None:
    """Also where several configs would have the same name; a job keeps the one that it has."""
    plan = with_jobs([PlannedJob("one", "a")], Plan())
    wanted = [PlannedJob(*one) for one in (("two", "a"), ("three", "a"), ("one", "b"))]
    jobs = with_jobs(wanted, plan).jobs
    assert {one: job.folder for one, job in jobs.items()} == {
        **{"one": "a", "two": "a-2", "three": "a-3"}
    }


def test_jobs_that_all_want_one_folder_are_numbered_in_one_go() -> None:
    """As with hydra.sweep.subdir=mine: ten thousand must not try each other's names."""
    tried = Counter[str]()

    class Name(str):
        def __format__(self, _: str) -> str:
            tried["names"] += 1
            return str(self)

    numbered = with_jobs([PlannedJob(str(number), Name("mine")) for number in range(100)], Plan())
    assert [one.folder for one in numbered.jobs.values()][-2:] == ["mine-99", "mine-100"]
    assert tried["names"] == 99


def test_two_commands_may_resume_one_run_in_one_sweep_folder(tmp_path: Path) -> None:
    """A run has no second folder, however many jobs the plan has of it."""
    run = str(tmp_path / "run")
    plan = with_jobs([PlannedJob(f"{number} {run}", run) for number in (1, 2)], Plan())
    assert [one.folder for one in plan.jobs.values()] == [run, run]


def test_a_start_asks_the_rules_again(tmp_path: Path) -> None:
    """What was invalid may be valid by now; what could not begin may begin."""
    planned(tmp_path, "a", "b")
    change_plan(tmp_path, lambda plan: with_fault("a", "the disk is full", plan))
    assert statuses(tmp_path) == {"a": "failed", "b": "queued"}
    assert read_plan(tmp_path).jobs["a"].standing(tmp_path).sentence == "the disk is full"
    change_plan(tmp_path, lambda plan: restarted(["mine"], plan))
    assert set(statuses(tmp_path)) == {"b"}
    forgotten = read_plan(tmp_path)
    assert with_fault("a", "why", forgotten) == forgotten  # another launcher has begun it again


def test_a_run_to_resume_waits_until_this_sweep_has_run_it(tmp_path: Path) -> None:
    """How it ended before says nothing of the job."""
    start_session(tmp_path, started_at=5.0, status="running")
    end_session(tmp_path, status="completed")
    job = PlannedJob(f"id {tmp_path}", str(tmp_path), resumes=5.0)
    assert (job.standing(tmp_path).status, job.standing(tmp_path).record) == ("queued", {})
    with RunDir(tmp_path).locked():
        assert job.standing(tmp_path).status == "starting"
    start_session(tmp_path, started_at=9.0, status="running")
    end_session(tmp_path, status="failed")
    assert job.standing(tmp_path).status == "failed"


def test_the_newest_unfinished_sweep_of_the_command_is_continued(tmp_path: Path) -> None:
    """A completed sweep is not continued, nor another command's, nor failures unless retried."""
    sweeps = {"older": None, "newer": "preempted", "lost": "failed", "done": "completed"}
    for age, (name, status) in enumerate([*sweeps.items(), ("other", None)]):
        planned(tmp_path / name, "a", command=["other" if name == "other" else "mine"])
        change_plan(tmp_path / name, lambda plan: Plan(plan.command, plan.jobs))
        if status is not None:
            write_run_record(tmp_path / name / "a", status=status)
        os.utime(tmp_path / name / PLAN, (age, age))
    for retry_failed, expected in ((False, "newer"), (True, "lost")):
        sweep = unfinished_sweep(tmp_path, command=["mine"], retry_failed=retry_failed)
        assert sweep == tmp_path / expected
    assert unfinished_sweep(tmp_path, command=["new"], retry_failed=True) is None
    planned(tmp_path / "open", command=["new"])  # a search, between two batches
    assert unfinished_sweep(tmp_path, command=["new"], retry_failed=False) == tmp_path / "open"


def test_a_plan_is_changed_by_one_launcher_at_a_time(tmp_path: Path) -> None:
    """Otherwise a launcher would overwrite the change of another."""
    planned(tmp_path, "a")
    other = threading.Thread(target=planned, args=(tmp_path, "b"))
    with locked(tmp_path / ".sweep.lock"):
        other.start()
        other.join(0.5)
        assert set(read_plan(tmp_path).jobs) == {"a"}
    other.join()
    assert set(read_plan(tmp_path).jobs) == {"a", "b"}


@pytest.mark.parametrize(
    "changed",
    [
        {"folder": "../elsewhere"},
        {"folder": ".."},
        {"folder": "/elsewhere"},
        {"folder": ""},
        {"folder": "a\0"},
        {"folder": 3},
        {"job_id": []},
        {"fault": {}},
        {"fault": "\ud800"},
        {"is_skipped": 3},
        {"status": "odd"},
    ],
)
def test_a_plan_with_an_odd_job_is_rejected(changed: dict[str, Any], tmp_path: Path) -> None:
    """A job's folder is below the sweep's, whoever wrote the plan."""
    planned(tmp_path, "a")
    fields = json.loads((tmp_path / PLAN).read_text())
    fields["jobs"][0] |= changed
    (tmp_path / PLAN).write_text(json.dumps(fields))
    for call in (read_plan, lambda folder: change_plan(folder, lambda plan: plan)):
        with pytest.raises(UserError, match=r"sweep\.json is damaged or of another version"):
            call(tmp_path)
