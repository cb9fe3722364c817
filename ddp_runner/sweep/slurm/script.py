"""Writes the script for sbatch that runs jobs of a sweep as an array, and submits it. Torch-free.

A job of Slurm is ``python -m ddp_runner resume=RUN`` on every rank.
"""

import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_runner.files import replace_file
from ddp_runner.job import Job, Status
from ddp_runner.sweep.slurm.queue import LOGS, RECORD, run_slurm
from ddp_runner.sweep.slurm.slurm_settings import Options, SlurmSettings
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record, write_run_record

RUNNER = (sys.executable, "-m", "ddp_runner")
OF_USER = ("SLURM_CONF", "SLURM_JWT")  # where Slurm is, and who asks
AROUND = ("SLURM", "SRUN_", "SBATCH_", "MASTER_")  # variables of a job, and of where ranks meet


def submit(
    jobs: Sequence[Job], *, folder: Path, options: Options, settings: SlurmSettings
) -> list[str]:
    """Submit frozen jobs of one layout as an array, and return their names.

    Args:
        jobs: with their folders.
        folder: of the sweep.
        options: of sbatch.
        settings: of the launcher.

    Raises:
        UserError: Slurm rejects them, or does not answer.
    """
    array = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)[:60]}.{secrets.token_hex(4)}"
    names = [f"{array}_{index}" for index, _ in enumerate(jobs)]
    for job, name in zip(jobs, names, strict=True):
        assert job.run_dir is not None
        before = read_run_record(job.run_dir, missing_ok=True).get("status")
        if before not in (None, Status.COMPLETED):  # how an earlier job ended says nothing of it
            write_run_record(job.run_dir, status=Status.QUEUED, error=None)
        replace_file(job.run_dir / RECORD, name)
    script = folder / LOGS / f"{array}.sbatch"
    write_sbatch_file(script, jobs, folder=folder, options=options, settings=settings)
    # What describes a job around this process would contradict what the new ones ask for.
    environ = {
        key: value
        for key, value in os.environ.items()
        if key in OF_USER or not key.startswith(AROUND)
    }
    run_slurm("sbatch", str(script), environ=environ, fix="; change the keys of hydra.launcher")
    return names


def resuming_words(job: Job) -> list[str]:
    """Return the words by which each rank of a job finds its frozen config, and what it lacks."""
    assert job.run_dir is not None
    (override,) = shlex.split(RunDir(job.run_dir.absolute()).resume_argument)
    return [override, *job.resume_arguments]


def write_sbatch_file(
    path: Path, jobs: Sequence[Job], *, folder: Path, options: Options, settings: SlurmSettings
) -> None:
    """Write a script for sbatch; its name is that of the array. For the arguments see ``submit``.

    If its time limit has stopped a job, the script queues it again: Slurm itself does so after a
    preemption only. A rank that SIGUSR1 has stopped ends with 128 + 10; one that stopped with the
    others, before the signal reached it, with 128 + 15. So it does after scancel, but then the job
    is no longer running.
    """
    at_once = settings.array_parallelism
    array = f"0-{len(jobs) - 1}" + (f"%{at_once}" if at_once else "")
    logs = f"{folder.absolute() / LOGS}/%x_%a.log"
    named = {"job_name": path.stem, "array": array, "output": logs, "chdir": str(Path.cwd())}
    # Since Slurm 22.05 srun gives a task one core, whatever the job has for each task.
    command = shlex.join(["srun", f"--cpus-per-task={options['cpus_per_task']}", *RUNNER])
    lines = [
        "#!/bin/bash",
        f"# Submit it with: sbatch {shlex.quote(str(path))}",
        *(_option(key, value) for key, value in {**named, **options}.items()),
        "",
        "runs=(",
        *(f"  {_double_quoted(shlex.join(resuming_words(job)))}" for job in jobs),
        ")",
        *settings.setup,
        'eval "words=(${runs[$SLURM_ARRAY_TASK_ID]})"',
        f'{command} "${{words[@]}}"',
        "code=$?",
        'if [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; then',
        # An array has the number of its last element, so that SLURM_JOB_ID may mean all of it.
        '  job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        '  state=$(squeue --noheader --jobs="$job" --format=%T)',
        f'  if [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt '
        f"{settings.max_requeues} ]; then",
        '    scontrol requeue "$job"',
        "  fi",
        "fi",
        'exit "$code"',
    ]
    replace_file(path, "\n".join([*lines, ""]))


def _option(key: str, value: str | int | bool) -> str:
    name = f"#SBATCH --{key.replace('_', '-')}"
    return name if value is True else f"{name}={shlex.quote(str(value))}"


def _double_quoted(text: str) -> str:
    """Return the words of a job as one word of bash; they hold single quotes already."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
