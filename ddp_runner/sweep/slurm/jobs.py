"""Submits the frozen jobs of a sweep to Slurm by submitit, and reads how each stands. Torch-free.

A job of Slurm is ``python -m ddp_runner resume=RUN`` on every rank, so nothing of the sweep is
pickled. Beside the run's own files, slurm.json names the job; it is written before the submission
and completed after it, so that a launcher that is killed in between submits no job twice.
"""

import json
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ddp_runner.errors import UserError, one_line
from ddp_runner.files import file_sha256, replace_file
from ddp_runner.host.processes import STOP_SIGNALS
from ddp_runner.job import Job, Status
from ddp_runner.sweep.slurm.commands import RUNNING, WAITING, cancel, jobs_named
from ddp_runner.sweep.slurm.settings import SlurmSettings, after_srun, srun_options
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

LOGS = "slurm"  # in the sweep's folder: what the jobs print, and submitit's files
RECORD = "slurm.json"  # in a run folder
RUNNER = (sys.executable, "-m", "ddp_runner")
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
    index: int | None  # in their array; None: the only one
    number: str | None = None  # as squeue shows it; None: the submission has not returned yet
    found: str | None = None  # the checksum of the run.json that was there; None: there was none


@dataclass(frozen=True)
class Standing:
    """How a job stands, with why if it failed or was stopped."""

    status: Status
    kind: str | None = None
    sentence: str | None = None
    is_final: bool = True  # False: Slurm has ended the job, and run.json may still change


def resuming_words(job: Job) -> list[str]:
    """Return the words by which each rank of a job finds its frozen config, and what it lacks."""
    assert job.run_dir is not None
    (override,) = shlex.split(RunDir(job.run_dir.absolute()).resume_argument)
    return [override, *job.said_again]


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
        UserError: Slurm rejects them.
    """
    from submitit import SlurmExecutor

    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)[:60]}.{secrets.token_hex(4)}"
    indexes = [None] if len(jobs) == 1 else list(range(len(jobs)))
    submissions = [
        Submission(name, index, found=_checksum(job.run_dir))
        for job, index in zip(jobs, indexes, strict=True)
    ]
    for job, submission in zip(jobs, submissions, strict=True):
        _record(job, submission)
    try:
        with _undisturbed():
            executor = SlurmExecutor(folder / LOGS)
            executor.update_parameters(
                job_name=name,
                array_parallelism=settings.array_parallelism or len(jobs),
                stderr_to_stdout=True,
                wckey=None,  # else submitit's own
                setup=list(settings.setup),
                srun_args=srun_options(options),
                teardown=after_srun(settings),
                additional_parameters=dict(options),
            )
            # submitit's process becomes the rank, so that Slurm's signals reach the rank.
            arguments = [[*RUNNER, *resuming_words(job)] for job in jobs]
            submitted = executor.map_array(os.execv, [sys.executable] * len(jobs), arguments)
    except RuntimeError as error:  # of submitit, with what sbatch printed
        raise UserError(
            f"Slurm rejects the jobs ({one_line(error)}); change hydra.launcher's keys"
        ) from error
    for job, submission, one in zip(jobs, submissions, submitted, strict=True):
        _record(job, replace(submission, number=str(one.job_id)))
    return [str(one.job_id) for one in submitted]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold signals back until sbatch has answered, and hide the job that this process is in.

    Ctrl-C would end sbatch too. A job that is submitted inside of another one inherits variables
    that contradict its own.
    """
    from submitit import helpers

    config = {key: value for key, value in os.environ.items() if key == "SLURM_CONF"}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with helpers.clean_env(), helpers.environment_variables(**config):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def submitted_number(run_dir: Path, *, folder: Path) -> str | None:
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
    for array in jobs_named(submission.name):
        number = array if submission.index is None else f"{array}_{submission.index}"
        if (folder / LOGS / f"{number}_submitted.pkl").exists():
            return number
        cancel([number])  # it would wait for that file
    return None


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
    log = folder / LOGS / f"{number}_0_log.out"
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
    if word == "OUT_OF_MEMORY":
        sentence = f"Slurm's job {number} took more memory than hydra.launcher.mem_gb; see {log}"
        return Standing(Status.FAILED, "crash", sentence, False)
    if word:
        sentence = f"Slurm's job {number} ended ({word}) before its run did; see {log}"
        return Standing(Status.FAILED, "crash", sentence, False)
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
