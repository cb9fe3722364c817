"""What a command submits of a sweep on Slurm that was begun before.

tests/cluster has whole sweeps on a real Slurm.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_command
from fake_slurm import SETTINGS, Queue, program, three_jobs
from sweeps import batch_of, statuses, table_row

from ddp_runner.errors import UserError
from ddp_runner.sweep.jobs import JobBatch, SweepJob
from ddp_runner.sweep.slurm import queue as slurm_queue
from ddp_runner.sweep.slurm.executor import Slurm, rank_arguments
from ddp_runner.sweep.slurm.queue import submitted_as
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record


@pytest.fixture
def batch(tmp_path: Path) -> JobBatch:
    """Return three queued jobs."""
    return three_jobs(tmp_path / "sweep")


def test_a_start_submits_only_what_is_neither_there_nor_done(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job is in the queue, one was completed meanwhile, one was cancelled."""
    sweep, submitted = batch.jobs["a"].sweep, list[str]()
    for index, name in enumerate("abc"):
        (sweep / name / "slurm.job").write_text(f"x_{index}")
    write_run_record(sweep / "b", status="completed")
    write_run_record(sweep / "c", status="preempted")

    def fake_submit(_: Slurm, jobs: list[SweepJob], options: object) -> list[str]:
        submitted.extend(job.job.title for job in jobs)
        return ["y_0"]

    monkeypatch.setattr(Slurm, "submit", fake_submit)
    queue = Queue(monkeypatch, {"x_0": "RUNNING", "y_0": "RUNNING"})

    def ask(num_asked: int) -> None:
        if num_asked == 3:
            write_run_record(sweep / "a", status="completed")
            write_run_record(sweep / "c", status="completed")
            queue.states = {}

    queue.on_ask = ask
    executor = Slurm(sweep, SETTINGS)
    outcomes = executor.run(batch)
    executor.close()
    assert submitted == ["job c"]
    assert [one.exit_code for one in outcomes.values()] == [0, 0, 0]
    assert set(statuses(sweep).values()) == {"completed"}


def test_a_failed_job_is_submitted_again_only_if_asked(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed while nobody watched."""
    sweep, submitted = batch.jobs["a"].sweep, list[str]()
    one = replace(batch, jobs={"a": batch.jobs["a"]})
    (sweep / "a" / "slurm.job").write_text("x_0")
    error = {"rank": 0, "kind": "crash", "sentence": "why"}
    write_run_record(sweep / "a", status="failed", error=error)

    def fake_submit(_: Slurm, jobs: list[SweepJob], options: object) -> list[str]:
        submitted.extend(job.job.title for job in jobs)
        write_run_record(sweep / "a", status="completed")
        return ["y_0"]

    monkeypatch.setattr(Slurm, "submit", fake_submit)
    Queue(monkeypatch, {})
    executor = Slurm(sweep, SETTINGS)
    assert [end.exit_code for end in executor.run(one).values()] == [1]
    assert (submitted, one.jobs["a"].standing.sentence) == ([], "why")
    again = batch_of(sweep, "a", retry="failed")
    assert [end.exit_code for end in executor.run(again).values()] == [0]
    assert submitted == ["job a"]
    executor.close()


def test_two_commands_never_submit_the_same_sweep(
    batch: JobBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a command submit a job that runs elsewhere."""
    Queue(monkeypatch, {})
    first, second = (Slurm(batch.jobs["a"].sweep, SETTINGS) for _ in range(2))
    first._lock()
    with pytest.raises(UserError, match=r"another command submits the jobs of .*sweep; wait"):
        second.run(batch)
    first.close()
    with (
        RunDir(batch.jobs["b"].run_dir.path).locked(),
        pytest.raises(UserError, match="b is in use by a process outside of this sweep's queue"),
    ):
        second.run(batch)
    second.close()


def test_a_submission_is_an_array_that_resumes_frozen_runs(
    batch: JobBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder names its job; sbatch sees no job around it."""
    programs = tmp_path / "bin"
    program(programs, "srun")
    program(programs, "sbatch", f"env > {tmp_path}/seen", "echo the site says hello")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/some/slurm.conf")
    monkeypatch.setenv("SLURM_JWT", "who I am")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    sweep = batch.jobs["a"].sweep
    settings = replace(SETTINGS, setup=["module load cuda"], array_parallelism=2)
    names = Slurm(sweep, settings).submit(
        [*batch.jobs.values()],
        {"partition": "gpu", "requeue": True, "signal": "USR1@90", "cpus_per_task": 3},
    )
    (path,) = (sweep / "slurm").glob("sweep.*.sbatch")
    assert names == [f"{path.stem}_{index}" for index in range(3)]
    assert [submitted_as(sweep / job) for job in "abc"] == names
    script = path.read_text()
    assert f"#SBATCH --job-name={path.stem}\n" in script
    assert f"#SBATCH --output={sweep}/slurm/%x_%a.log\n" in script
    assert all(f"resume={sweep / name}" in script for name in "abc")
    for line in ("array=0-2%2", "partition=gpu", "requeue", "signal=USR1@90"):
        assert f"#SBATCH --{line}\n" in script
    assert re.search(r"^srun .*--cpus-per-task=3 ", script, re.MULTILINE)
    assert script.index("module load cuda") < script.index("\nsrun ") < script.index('requeue "')
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/some/slurm.conf" in seen
    assert "SLURM_JWT=who I am" in seen
    assert "SLURM_MEM_PER_CPU" not in seen


def test_a_job_is_told_what_its_frozen_config_cannot_say(batch: JobBatch, tmp_path: Path) -> None:
    """Its trackers above all, each job its own: in the script for sbatch."""
    said = {"a": (), "b": ("--config-dir=/my $conf", "+trackers.x.y='it\"s'", "tags=[c, d]")}
    jobs = [
        replace(batch.jobs[name], job=replace(batch.jobs[name].job, resume_arguments=words))
        for name, words in said.items()
    ]
    options = {"cpus_per_task": 1}
    words = [[f"resume={job.run_dir}", *job.job.resume_arguments] for job in jobs]
    assert [rank_arguments(job) for job in jobs] == words
    script = tmp_path / "sweep.sbatch"
    Slurm(tmp_path, SETTINGS).write_sbatch_file(script, jobs, options)
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
         r"^sbatch failed: .*invalid partition; change the keys of hydra\.launcher$"),
        ("sleep 9", r"^sbatch did not answer within 0\.3 s; try again$"),
    ],
)  # fmt: skip
def test_what_slurm_rejects_is_one_line(
    batch: JobBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, sentence: str
) -> None:
    """With what sbatch printed. The next start looks for the jobs by their names."""
    monkeypatch.setattr(slurm_queue, "LIMIT_S", 0.3 if "sleep" in sbatch else 60.0)
    program(tmp_path / "bin", "srun")
    program(tmp_path / "bin", "sbatch", sbatch)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sweep, jobs = batch.jobs["a"].sweep, [*batch.jobs.values()]
    with pytest.raises(UserError, match=sentence):
        Slurm(sweep, SETTINGS).submit(jobs, {"cpus_per_task": 1})
    assert str(submitted_as(sweep / "a")).startswith("sweep.")


@pytest.mark.parametrize(
    ("code", "state", "restarts", "is_requeued"),
    [
        (138, "RUNNING", "", True),
        (143, "RUNNING", "2", True),
        (138, "RUNNING", "20", False),
        (143, "COMPLETING", "", False),
        (1, "RUNNING", "", False),
        (0, "RUNNING", "", False),
    ],
)
def test_a_job_that_its_time_limit_stops_is_queued_again(
    batch: JobBatch, tmp_path: Path, code: int, state: str, restarts: str, *, is_requeued: bool
) -> None:
    """It is not after scancel or a failure, nor too many times; the exit code stays.

    An array's last job has the number of the array, which means all of them to Slurm.
    """
    programs, script = tmp_path / "bin", tmp_path / "mine.sbatch"
    of_array = f"echo {state}; echo RUNNING"
    program(programs, "srun", f"exit {code}")
    program(programs, "squeue", f'[[ "$*" == *=7_0* ]] && echo {state} || {{ {of_array}; }}')
    program(programs, "scontrol", f'echo "$@" > {tmp_path}/asked')
    jobs, options = [batch.jobs["a"]], {"cpus_per_task": 1}
    Slurm(tmp_path, SETTINGS).write_sbatch_file(script, jobs, options)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    if restarts:
        environ["SLURM_RESTART_COUNT"] = restarts
    assert subprocess.run(["bash", str(script)], env=environ, check=False).returncode == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else None) == (
        "requeue 7_0\n" if is_requeued else None
    )


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
