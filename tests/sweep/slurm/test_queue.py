"""A job's standing follows from Slurm's queue and its run.json."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import SETTINGS, program, three_jobs

from ddp_runner.errors import UserError
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.slurm.queue import cancel, job_standing, note_end, queued_states, submitted_as
from ddp_runner.tracking.run_record import read_run_record, write_run_record


def test_jobs_are_found_and_cancelled_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each array is cancelled by its name, which its jobs have in common."""
    asked = tmp_path / "asked"
    jobs = ("PENDING a.1_0", "RUNNING a.1_1", "FAILED b.2_0", "RUNNING my own job_N/A")
    program(tmp_path / "bin", "squeue", f'echo "$@" >> {asked}', *(f"echo {one}" for one in jobs))
    program(tmp_path / "bin", "scancel", f'echo "$@" >> {asked}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    states = queued_states()
    assert states.pop("my own job_N/A") == "RUNNING"
    assert states == {"a.1_0": "PENDING", "a.1_1": "RUNNING", "b.2_0": "FAILED"}
    cancel(states)
    squeue, *cancelled = asked.read_text().splitlines()
    assert "--format=%T %j_%K" in squeue
    assert cancelled == ["--name=a.1", "--name=b.2"]


@pytest.mark.parametrize("content", [b"", b"a.1_0 and more", b"\xff\xfe_1"])
def test_a_damaged_name_of_a_job_is_not_taken_for_a_job_that_slurm_has_forgotten(
    tmp_path: Path, content: bytes
) -> None:
    """Its job may still run, and would be submitted a second time."""
    assert submitted_as(tmp_path) is None
    path = tmp_path / "slurm.job"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"slurm\.job is damaged and does not name a job of Slurm;"):
        submitted_as(tmp_path)
    path.write_text("my-sweep.0f_12")
    assert submitted_as(tmp_path) == "my-sweep.0f_12"


@pytest.mark.parametrize(
    ("state", "fields", "status", "part"),
    [
        ("PENDING", {"status": "preempted"}, "queued", None),
        ("COMPLETING", {"status": "completed"}, "running", None),
        ("COMPLETED", {"status": "completed"}, "completed", None),
        (None, {"status": "completed"}, "completed", None),
        (
            "FAILED",
            {"status": "failed", "error": {"rank": 1, "kind": "user", "sentence": "why"}},
            "failed",
            "why",
        ),
        ("CANCELLED", None, "preempted", "x_1 was cancelled; the same command continues it"),
        ("TIMEOUT", {"status": "running"}, "preempted", "reached its time limit"),
        (None, {"status": "running"}, "preempted", "Slurm has forgotten job x_1"),
        ("FAILED", {"status": "running"}, "failed", "ended (FAILED) before its run did"),
        ("OUT_OF_MEMORY", {"status": "running"}, "failed", "more memory than hydra.launcher.mem"),
    ],
)
def test_how_a_job_stands_follows_from_the_queue_and_run_json(
    tmp_path: Path, state: str | None, fields: dict[str, Any] | None, status: str, part: str | None
) -> None:
    """No accounting is needed: a job that Slurm has forgotten has ended."""
    run_dir = tmp_path / "run"
    if fields is not None:
        write_run_record(run_dir, **fields)
    current = job_standing(run_dir, name="x_1", state=state, sweep=tmp_path)
    assert current.status == status
    assert (part is None) == (current.sentence is None)
    assert part is None or part in str(current.sentence)


def test_a_job_that_fails_before_it_has_a_run_is_explained_by_its_log(tmp_path: Path) -> None:
    """The reason is the log's last error line, and says where the log is."""
    log = tmp_path / "slurm" / "x_0.log"
    log.parent.mkdir()
    log.write_text("error: not this\nslurmstepd: x\nerror: data_root (x) is not a folder\nmore\n")
    current = job_standing(tmp_path / "run", name="x_0", state="FAILED", sweep=tmp_path)
    assert (current.status, current.kind) == ("failed", "user")
    assert current.sentence == f"data_root (x) is not a folder; see {log}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("state", "before", "status", "part"),
    [
        ("FAILED", "preempted", "failed", "dataset.folder (x)"),
        ("NODE_FAIL", "failed", "preempted", "lost a node"),
        (None, "failed", "failed", "dataset.folder (x)"),
        ("COMPLETED", "completed", "completed", None),
    ],
)
def test_a_job_that_dies_before_its_run_goes_on_is_not_judged_by_the_run_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str | None,
    before: str,
    status: str,
    part: str | None,
) -> None:
    """Its run.json is that of an earlier job, until a rank writes it."""
    batch = three_jobs(tmp_path / "sweep")
    program(tmp_path / "bin", "srun")
    program(tmp_path / "bin", "sbatch", "")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sweep, run_dir = batch.jobs["a"].sweep, batch.jobs["a"].sweep / "a"
    error = {"rank": 0, "kind": "crash", "sentence": "an old crash"}
    write_run_record(run_dir, status=before, error=error)
    options = {"cpus_per_task": 1}
    (submitted,) = Slurm(sweep, SETTINGS).submit([batch.jobs["a"]], options)
    if part is not None and "folder" in part:
        (sweep / "slurm" / f"{submitted}.log").write_text(f"error: {part}\n")
    current = job_standing(run_dir, name=submitted, state=state, sweep=sweep)
    assert current.status == status
    assert part is None or part in str(current.sentence)
    write_run_record(run_dir, status="failed", error={**error, "sentence": "a new crash"})
    current = job_standing(run_dir, name=submitted, state=state, sweep=sweep)
    assert (current.status, current.sentence) == ("failed", "a new crash")


def test_an_end_is_noted_once_and_never_changes_what_a_run_has_said(tmp_path: Path) -> None:
    """Its folder then names no job, so the next start of the sweep looks at run.json alone."""
    error = {"rank": 1, "kind": "crash", "sentence": "why"}
    write_run_record(tmp_path, status="failed", error=error, finished_at=1.0)
    (tmp_path / "slurm.job").write_text("x_0")
    note_end(tmp_path, job_standing(tmp_path, name="x_0", state="FAILED", sweep=tmp_path))
    assert read_run_record(tmp_path) == {"status": "failed", "error": error, "finished_at": 1.0}
    assert submitted_as(tmp_path) is None
    write_run_record(tmp_path, status="running", error=None)
    note_end(tmp_path, job_standing(tmp_path, name="x_1", state="TIMEOUT", sweep=tmp_path))
    record = read_run_record(tmp_path)
    assert (record["status"], record["error"]["kind"]) == ("preempted", "signal")
    assert "x_1 reached its time limit" in record["error"]["sentence"]
