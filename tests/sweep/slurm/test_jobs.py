"""Jobs that are submitted to Slurm, and how each stands by the queue and its run.json."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from fake_slurm import SETTINGS, program, three_jobs
from sweeps import statuses, table_row

from ddp_runner.errors import UserError
from ddp_runner.sweep.jobs import Batch
from ddp_runner.sweep.slurm import commands
from ddp_runner.sweep.slurm import jobs as slurm_jobs
from ddp_runner.sweep.slurm.jobs import (
    RECORD,
    job_state,
    number_of,
    submission_of,
    submit,
)
from ddp_runner.sweep.slurm.sbatch_file import resuming_words, write_sbatch_file
from ddp_runner.tracking.run_record import write_run_record


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Three queued jobs."""
    return three_jobs(tmp_path / "sweep")


def number(run_dir: Path) -> str | None:
    """Return the number of the job that a run was last submitted as; None: Slurm has none."""
    submission = submission_of(run_dir)
    return number_of(submission) if submission else None


def test_a_submission_is_an_array_that_resumes_frozen_runs(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder names its job; sbatch sees no job around it."""
    programs = tmp_path / "bin"
    program(programs, "srun")
    program(
        programs, "sbatch", f"env > {tmp_path}/seen", "echo the site says hello", "echo '7;cluster'"
    )
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/some/slurm.conf")
    monkeypatch.setenv("SLURM_JWT", "who I am")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    sweep = batch.jobs["a"].sweep
    settings = replace(SETTINGS, setup=["module load cuda"], array_parallelism=2)
    numbers = submit(
        [one.job for one in batch.jobs.values()],
        folder=sweep,
        options={"partition": "gpu", "requeue": True, "signal": "USR1@90", "cpus_per_task": 3},
        settings=settings,
    )
    assert numbers == ["7_0", "7_1", "7_2"]
    assert [number(sweep / name) for name in "abc"] == numbers
    (path,) = (sweep / "slurm").glob("sweep.*.sbatch")
    script = path.read_text()
    assert f"#SBATCH --job-name={path.stem}\n" in script
    assert f"#SBATCH --output={sweep}/slurm/%A_%a.log\n" in script
    assert all(f"resume={sweep / name}" in script for name in "abc")
    for line in ("array=0-2%2", "partition=gpu", "requeue", "signal=USR1@90"):
        assert f"#SBATCH --{line}\n" in script
    assert re.search(r"^srun .*--cpus-per-task=3 ", script, re.MULTILINE)
    assert script.index("module load cuda") < script.index("\nsrun ") < script.index('requeue "')
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/some/slurm.conf" in seen
    assert "SLURM_JWT=who I am" in seen
    assert "SLURM_MEM_PER_CPU" not in seen


def test_a_job_is_told_what_its_frozen_config_cannot_say(batch: Batch, tmp_path: Path) -> None:
    """Its trackers above all, each job its own: in the script for sbatch."""
    said = {"a": (), "b": ("--config-dir=/my $conf", "+trackers.x.y='it\"s'", "tags=[c, d]")}
    jobs = [replace(batch.jobs[name].job, said_again=words) for name, words in said.items()]
    options = {"cpus_per_task": 1}
    words = [[f"resume={job.run_dir}", *job.said_again] for job in jobs]
    assert [resuming_words(job) for job in jobs] == words
    script = tmp_path / "sweep.sbatch"
    named = {"folder": tmp_path, "name": "mine", "settings": SETTINGS}
    write_sbatch_file(script, jobs, options=options, **named)
    program(tmp_path / "bin", "srun", 'printf "%s\\0" "$@"')
    for index, expected in enumerate(words):
        environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        end = subprocess.run(
            ["bash", str(script)],
            env=environ | {"SLURM_ARRAY_TASK_ID": str(index)},
            capture_output=True,
            text=True,
            check=True,
        )
        rest = end.stdout.partition("ddp_runner\0")[2]
        assert rest.split("\0")[:-1] == expected


@pytest.mark.parametrize(
    ("sbatch", "sentence"),
    [
        ("echo 'sbatch: error: invalid partition' >&2; exit 1",
         r"^Slurm rejects the jobs .*invalid partition.*; change hydra\.launcher's keys"),
        ("echo queued", r"^sbatch must print a job's number and printed \(queued\); see squeue"),
        ("sleep 9", r"^sbatch did not answer within 0\.3 s; try again$"),
    ],
)  # fmt: skip
def test_what_slurm_rejects_is_said_and_submitted_by_the_next_start(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, sentence: str
) -> None:
    """In one line, with what sbatch printed. The next start looks for the jobs by their name."""
    monkeypatch.setattr(commands, "LIMIT_S", 0.3 if "sleep" in sbatch else 60.0)
    program(tmp_path / "bin", "srun")
    program(tmp_path / "bin", "sbatch", sbatch)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sweep, jobs = batch.jobs["a"].sweep, [one.job for one in batch.jobs.values()]
    with pytest.raises(UserError, match=sentence):
        submit(jobs, folder=sweep, options={"cpus_per_task": 1}, settings=SETTINGS)
    monkeypatch.setattr(slurm_jobs, "jobs_named", lambda name: [])
    assert number(sweep / "a") is None


def test_a_batch_that_scancel_fails_for_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fault is told."""
    asked = tmp_path / "asked"
    program(tmp_path / "bin", "scancel", f'echo $# >> {asked}; [ "$1" != 0000 ]')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    fault = commands.cancel([f"{number:04}" for number in range(2 * commands.MOST_IDS + 1)])
    assert fault == "scancel failed: exit code 1"
    assert asked.read_text().split() == ["500", "500", "1"]


def test_a_submission_that_was_cut_off_is_found_by_its_name(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has the array, or has never seen it."""
    sweep = batch.jobs["a"].sweep
    monkeypatch.setattr(slurm_jobs, "jobs_named", lambda name: {"mine": ["9"]}.get(name, []))
    for index, (name, array) in enumerate((("a", "mine"), ("b", "lost"))):
        submission = {"name": array, "index": index, "number": None}
        (sweep / name / RECORD).write_text(json.dumps(submission))
    assert number(sweep / "a") == "9_0"
    assert number(sweep / "b") is None
    assert number(sweep / "c") is None


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
        ("CANCELLED", None, "preempted", "5_1 was cancelled; the same command goes on with it"),
        ("TIMEOUT", {"status": "running"}, "preempted", "reached its time limit"),
        (None, {"status": "running"}, "preempted", "Slurm has forgotten job 5_1"),
        ("FAILED", {"status": "running"}, "failed", "ended (FAILED) before its run did"),
        ("OUT_OF_MEMORY", {"status": "running"}, "failed", "more memory than hydra.launcher.mem"),
    ],
)
def test_how_a_job_stands_follows_from_the_queue_and_run_json(
    tmp_path: Path,
    state: str | None,
    fields: dict[str, Any] | None,
    status: str,
    part: str | None,
) -> None:
    """Without accounting: a job that Slurm has forgotten has ended, and is not waited for."""
    run_dir = tmp_path / "run"
    if fields is not None:
        write_run_record(run_dir, **fields)
    found = job_state(run_dir, number="5_1", state=state, folder=tmp_path)
    assert found.status == status
    assert (part is None) == (found.sentence is None)
    assert part is None or part in str(found.sentence)


def test_a_job_that_fails_before_it_has_a_run_is_explained_by_its_log(tmp_path: Path) -> None:
    """Its last error line, and where the log is."""
    log = tmp_path / "slurm" / "5_0.log"
    log.parent.mkdir()
    log.write_text("error: not this\nslurmstepd: x\nerror: data_root (x) is not a folder\nmore\n")
    found = job_state(tmp_path / "run", number="5_0", state="FAILED", folder=tmp_path)
    assert (found.status, found.kind) == ("failed", "user")
    assert found.sentence == f"data_root (x) is not a folder; see {log}"


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
    batch: Batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str | None,
    before: str,
    status: str,
    part: str | None,
) -> None:
    """Its run.json is that of an earlier job, until a rank writes it."""
    program(tmp_path / "bin", "srun")
    program(tmp_path / "bin", "sbatch", "echo 7")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sweep, run_dir = batch.jobs["a"].sweep, batch.jobs["a"].sweep / "a"
    error = {"rank": 0, "kind": "crash", "sentence": "an old crash"}
    write_run_record(run_dir, status=before, error=error)
    options = {"cpus_per_task": 1}
    (submitted,) = submit([batch.jobs["a"].job], folder=sweep, options=options, settings=SETTINGS)
    if part is not None and "folder" in part:
        (sweep / "slurm" / f"{submitted}.log").write_text(f"error: {part}\n")
    found = job_state(run_dir, number=submitted, state=state, folder=sweep)
    assert found.status == status
    assert part is None or part in str(found.sentence)
    write_run_record(run_dir, status="failed", error={**error, "sentence": "a new crash"})
    found = job_state(run_dir, number=submitted, state=state, folder=sweep)
    assert (found.status, found.sentence) == ("failed", "a new crash")


@pytest.mark.full
def test_a_script_for_sbatch_runs_the_frozen_jobs(tmp_path: Path) -> None:
    """The table then tells how they stand, and the same command writes what is left.

    The folder has characters that bash and Hydra would change.
    """
    folder = tmp_path / "it's $HOME, a=b"
    sweep = (
        *("-m", "model=toy", "seed=1,2", "world_size=1", "train.max_steps=2"),
        *(
            "hydra/launcher=slurm",
            "hydra.launcher.gpus_per_node=0",
            "hydra.launcher.cpus_per_node=2",
        ),
        *("hydra.launcher.submit=false", "hydra.sweep.dir=sweep", "hydra.launcher.timeout_min=5"),
    )
    end = run_command(*sweep, folder=folder)
    assert (end.exit_code, end.stderr) == (0, "")
    assert "2 jobs: submit with  sbatch sweep/sweep.sbatch\n" in end.stdout
    script = folder / "sweep" / "sweep.sbatch"
    for line in ("array=0-1", "ntasks-per-node=1", "time=5", "signal=USR1@90", "requeue"):
        assert f"#SBATCH --{line}\n" in script.read_text()
    assert table_row(end.stdout, "seed=2")[1] == "queued"

    program(tmp_path / "bin", "srun", f'printf "%s\\0" "$@" > {tmp_path}/asked')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}
    subprocess.run(["bash", str(script)], env=environ, cwd=folder, check=True)
    *started, resume, end_of_words = (tmp_path / "asked").read_text().split("\0")
    assert started == ["--cpus-per-task=1", sys.executable, "-m", "ddp_runner"]
    assert end_of_words == ""
    assert run_command(resume, folder=folder).exit_code == 0
    (folder / "sweep" / "seed=1" / "run.json").write_text('{"status": "preempted"}')
    table = run_command("sweep", folder=folder, program=(sys.executable, "-m", "ddp_runner.sweep"))
    assert table_row(table.stdout, "seed=1")[1] == "preempted"
    assert table_row(table.stdout, "seed=2")[1] == "completed"
    end = run_command(*sweep, folder=folder)
    assert "1 job: submit with" in end.stdout
    assert statuses(folder / "sweep") == {"seed=1": "preempted", "seed=2": "completed"}
    assert "seed=1'" in script.read_text()
    assert "seed=2'" not in script.read_text()
