"""Submits the frozen jobs of a sweep to Slurm by sbatch, and reads how each stands. Torch-free.

A job of Slurm is ``python -m ddp_runner resume=RUN`` on every rank. Beside the run's own files,
slurm.json names the job; it is written before the submission and completed after it, so that a
launcher that is killed in between submits no job twice.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import CalledProcessError

from ddp_runner.errors import UserError, one_line
from ddp_runner.files import replace_file
from ddp_runner.job import Job, Status
from ddp_runner.sweep.slurm.commands import RUNNING, WAITING, jobs_named, run_slurm
from ddp_runner.sweep.slurm.sbatch_file import LOGS, write_sbatch_file
from ddp_runner.sweep.slurm.settings import SlurmSettings
from ddp_runner.tracking.run_record import RunError, read_run_record, write_run_record

RECORD = "slurm.json"  # in a run folder
OF_USER = ("SLURM_CONF", "SLURM_JWT")  # where Slurm is, and who asks
AROUND = ("SLURM", "SRUN_", "SBATCH_", "MASTER_")  # variables of a job, and of where ranks meet
# Why Slurm ended a job that can go on.
STOPPED = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "had a node that did not start",
}


@dataclass(frozen=True)
class Submission:
    """The job of Slurm that runs a job of the sweep."""

    name: str  # of all jobs that were submitted together
    index: int  # in their array
    number: str | None = None  # as squeue shows it; None: the submission has not returned yet
    is_noted: bool = False  # a command of the sweep has seen how it ended


@dataclass(frozen=True)
class JobState:
    """How a job stands in Slurm's queue, or how it ended, with why if it failed or was stopped."""

    status: Status
    kind: str | None = None
    sentence: str | None = None
    is_final: bool = True  # False: Slurm has ended the job, and run.json may still change


def submit(
    jobs: Sequence[Job],
    *,
    folder: Path,
    options: Mapping[str, str | int | bool],
    settings: SlurmSettings,
) -> list[str]:
    """Submit jobs of one shape as an array, and return their numbers.

    Args:
        jobs: with their frozen folders.
        folder: of the sweep.
        options: of sbatch.
        settings: of the launcher.

    Raises:
        UserError: Slurm rejects them, or does not answer.
    """
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)[:60]}.{secrets.token_hex(4)}"
    submissions = [Submission(name, index) for index, _ in enumerate(jobs)]
    for job, submission in zip(jobs, submissions, strict=True):
        assert job.run_dir is not None
        before = read_run_record(job.run_dir, missing_ok=True).get("status")
        if before not in (None, Status.COMPLETED):  # how an earlier job ended says nothing of it
            write_run_record(job.run_dir, status=Status.QUEUED, error=None)
        record_submission(job.run_dir, submission)
    script = folder / LOGS / f"{name}.sbatch"
    write_sbatch_file(script, jobs, folder=folder, name=name, options=options, settings=settings)
    # What describes a job around this process would contradict what the new ones ask for.
    around = [key for key in os.environ if key.startswith(AROUND) and key not in OF_USER]
    environ = {key: value for key, value in os.environ.items() if key not in around}
    try:
        printed = run_slurm("sbatch", "--parsable", str(script), environ=environ)
    except UserError as error:
        if not isinstance(error.__cause__, CalledProcessError):
            raise
        raise UserError(
            f"Slurm rejects the jobs ({error}); change hydra.launcher's keys"
        ) from error
    # A site's own text may come before, and a cluster's name may follow.
    array = printed.strip().rpartition("\n")[2].partition(";")[0]
    if not array.isdecimal():
        raise UserError(
            f"sbatch must print a job's number and printed ({' '.join(printed.split())}); see "
            "squeue, and start the sweep again: it finds its jobs by their name"
        )
    numbers = [f"{array}_{submission.index}" for submission in submissions]
    for job, submission, number in zip(jobs, submissions, numbers, strict=True):
        assert job.run_dir is not None
        record_submission(job.run_dir, replace(submission, number=number))
    return numbers


def record_submission(run_dir: Path, submission: Submission) -> None:
    """Write the submission of a run into its folder."""
    replace_file(run_dir / RECORD, json.dumps(asdict(submission)))


def submission_of(run_dir: Path) -> Submission | None:
    """Return the last submission of a run; None: it was not submitted.

    Raises:
        UserError: the record is damaged.
    """
    path = run_dir / RECORD
    if not path.exists():
        return None
    try:
        return Submission(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({one_line(error)}); delete it once squeue shows no job for "
            f"{run_dir.name}"
        ) from error


def number_of(submission: Submission) -> str | None:
    """Return the number of a submitted job; None: Slurm does not know it.

    Raises:
        UserError: Slurm does not answer.
    """
    if submission.number is not None:
        return submission.number
    # The launcher was killed while it submitted the job.
    arrays = jobs_named(submission.name)
    return f"{arrays[0]}_{submission.index}" if arrays else None


def job_state(run_dir: Path, *, number: str, state: str | None, folder: Path) -> JobState:
    """Return how a job stands, by Slurm's state of it and by its run.json.

    Args:
        run_dir: of the run.
        number: of Slurm's job.
        state: as squeue shows it; None: Slurm has forgotten the job, so it has ended.
        folder: of the sweep.
    """
    word = state or ""
    if word in WAITING:
        return JobState(Status.QUEUED)
    if word in RUNNING:
        return JobState(Status.RUNNING)
    try:
        record = read_run_record(run_dir, missing_ok=True)
    except UserError as error:
        return JobState(Status.FAILED, "user", str(error))
    log = folder / LOGS / f"{number}.log"
    status = record.get("status")
    if status == Status.COMPLETED:
        return JobState(Status.COMPLETED)
    if status == Status.FAILED:
        why = record.get("error") or {}
        return JobState(Status.FAILED, str(why.get("kind")), str(why.get("sentence")))
    is_final = status == Status.PREEMPTED
    if word in STOPPED or is_final:
        end = STOPPED.get(word, "was stopped")
        sentence = f"Slurm's job {number} {end}; the same command goes on with it, see {log}"
        return JobState(Status.PREEMPTED, "signal", sentence, is_final)
    if (printed := _last_error(log)) is not None:
        return JobState(Status.FAILED, "user", f"{printed}; see {log}", False)
    if word:
        end = f"ended ({word}) before its run did"
        end = "took more memory than hydra.launcher.mem_gb" if word == "OUT_OF_MEMORY" else end
        return JobState(Status.FAILED, "crash", f"Slurm's job {number} {end}; see {log}", False)
    sentence = (
        f"Slurm has forgotten job {number} and its run has not completed; the same command goes "
        f"on with it, see {log}"
    )
    return JobState(Status.PREEMPTED, "signal", sentence, False)


def note_end(run_dir: Path, state: JobState) -> None:
    """Write into run.json how a job ended, if its run has not said so, and that it is known.

    Nobody else writes there: Slurm has ended the job.

    Raises:
        UserError: a file is damaged, or cannot be written.
    """
    record = read_run_record(run_dir, missing_ok=True)
    is_said = record.get("status") == state.status and (record.get("error") or not state.sentence)
    if not is_said:
        error = RunError(rank=None, kind=state.kind or "signal", sentence=state.sentence or "")
        write_run_record(run_dir, status=state.status, finished_at=time.time(), error=error)
    if (submission := submission_of(run_dir)) is not None:
        record_submission(run_dir, replace(submission, is_noted=True))


def _last_error(log: Path) -> str | None:
    """Return what a run printed as its error; None if it printed none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None
