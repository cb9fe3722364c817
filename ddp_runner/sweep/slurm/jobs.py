"""Submits the frozen jobs of a sweep to Slurm by sbatch, and reads how each stands. Torch-free.

A job of Slurm is ``python -m ddp_runner resume=RUN`` on every rank. Beside the run's own files,
slurm.json names the job; it is written before the submission and completed after it, so that a
launcher that is killed in between submits no job twice.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import CalledProcessError

from ddp_runner.errors import UserError, one_line
from ddp_runner.files import file_sha256, replace_file
from ddp_runner.job import Job, Status
from ddp_runner.sweep.slurm.commands import RUNNING, WAITING, jobs_named, run_slurm
from ddp_runner.sweep.slurm.sbatch_file import LOGS, write_sbatch_file
from ddp_runner.sweep.slurm.settings import SlurmSettings
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

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
    found: str | None = None  # the checksum of the run.json that was there; None: there was none


@dataclass(frozen=True)
class Standing:
    """How a job stands, with why if it failed or was stopped."""

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
    submissions = [
        Submission(name, index, found=_checksum(job.run_dir)) for index, job in enumerate(jobs)
    ]
    for job, submission in zip(jobs, submissions, strict=True):
        _record(job, submission)
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
        _record(job, replace(submission, number=number))
    return numbers


def _record(job: Job, submission: Submission) -> None:
    assert job.run_dir is not None
    replace_file(job.run_dir / RECORD, json.dumps(asdict(submission)))


def _checksum(run_dir: Path | None) -> str | None:
    """Return the checksum of a run's run.json; None if it has none that can be read."""
    assert run_dir is not None
    with suppress(OSError):
        return file_sha256(RunDir(run_dir).record)
    return None


def _submission(run_dir: Path) -> Submission | None:
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


def submitted_number(run_dir: Path) -> str | None:
    """Return the number of the job that a run was last submitted as; None: it was not.

    Raises:
        UserError: the record is damaged, or Slurm does not answer.
    """
    submission = _submission(run_dir)
    if submission is None:
        return None
    if submission.number is not None:
        return submission.number
    # The launcher was killed while it submitted the job.
    arrays = jobs_named(submission.name)
    return f"{arrays[0]}_{submission.index}" if arrays else None


def standing(run_dir: Path, *, number: str, state: str | None, folder: Path) -> Standing:
    """Return how a job stands, by Slurm's state of it and by its run.json.

    Args:
        run_dir: of the run.
        number: of Slurm's job.
        state: as squeue shows it; None: Slurm has forgotten the job, so it has ended.
        folder: of the sweep.
    """
    word = state or ""
    if word in WAITING:
        return Standing(Status.QUEUED)
    if word in RUNNING:
        return Standing(Status.RUNNING)
    try:
        submission = _submission(run_dir)
        found = submission.found if submission else None
        is_earlier = found is not None and found == _checksum(run_dir)
        record = read_run_record(run_dir, missing_ok=True)
    except UserError as error:
        return Standing(Status.FAILED, "user", str(error))
    log = folder / LOGS / f"{number}.log"
    status = record.get("status")
    if status == Status.COMPLETED:
        return Standing(Status.COMPLETED)
    if is_earlier:
        status = None  # of an earlier job: this one has ended before its run began
    if status == Status.FAILED:
        why = record.get("error") or {}
        return Standing(Status.FAILED, str(why.get("kind")), str(why.get("sentence")))
    is_final = status == Status.PREEMPTED
    if word in STOPPED or is_final:
        end = STOPPED.get(word, "was stopped")
        sentence = f"Slurm's job {number} {end}; the same command goes on with it, see {log}"
        return Standing(Status.PREEMPTED, "signal", sentence, is_final)
    if (printed := _last_error(log)) is not None:
        return Standing(Status.FAILED, "user", f"{printed}; see {log}", False)
    if word:
        end = f"ended ({word}) before its run did"
        end = "took more memory than hydra.launcher.mem_gb" if word == "OUT_OF_MEMORY" else end
        return Standing(Status.FAILED, "crash", f"Slurm's job {number} {end}; see {log}", False)
    sentence = (
        f"Slurm has forgotten job {number} and its run has not completed; the same command goes "
        f"on with it, see {log}"
    )
    return Standing(Status.PREEMPTED, "signal", sentence, False)


def _last_error(log: Path) -> str | None:
    """Return what a run printed as its error; None if it printed none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None
