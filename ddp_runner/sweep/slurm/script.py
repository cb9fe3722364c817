"""Writes and submits sbatch scripts: an array of jobs of a sweep. Torch-free.

Each rank of a job runs ``python -m ddp_runner resume=RUN``.
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
# A job around this process sets variables with these prefixes. sbatch must not see them: they would
# contradict the options of the new jobs. It needs the address of Slurm and the user's token.
JOB_PREFIXES = ("SLURM", "SRUN_", "SBATCH_", "MASTER_")
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_JWT")


def submit(
    jobs: Sequence[Job], *, folder: Path, options: Options, settings: SlurmSettings
) -> list[str]:
    """Submit frozen jobs as an array, and return their names; `folder` is the sweep's."""
    array = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)[:60]}.{secrets.token_hex(4)}"
    names = [f"{array}_{index}" for index, _ in enumerate(jobs)]
    for job, name in zip(jobs, names, strict=True):
        assert job.run_dir is not None
        earlier = read_run_record(job.run_dir, missing_ok=True).get("status")
        if earlier not in (None, Status.COMPLETED):  # the end of an earlier job
            write_run_record(job.run_dir, status=Status.QUEUED, error=None)
        replace_file(job.run_dir / RECORD, name)
    script = folder / LOGS / f"{array}.sbatch"
    write_sbatch_file(script, jobs, folder=folder, options=options, settings=settings)
    environ = {
        key: value
        for key, value in os.environ.items()
        if key in KEPT_VARIABLES or not key.startswith(JOB_PREFIXES)
    }
    run_slurm("sbatch", str(script), environ=environ, fix="; change the keys of hydra.launcher")
    return names


def rank_arguments(job: Job) -> list[str]:
    """Return the arguments of each rank: its run, and what the frozen config does not hold."""
    assert job.run_dir is not None
    (override,) = shlex.split(RunDir(job.run_dir.absolute()).resume_argument)
    return [override, *job.resume_arguments]


def write_sbatch_file(
    path: Path, jobs: Sequence[Job], *, folder: Path, options: Options, settings: SlurmSettings
) -> None:
    """Write a script for sbatch, named after the array; see ``submit`` for the other arguments.

    The script requeues a job that stopped before its time limit; Slurm only requeues after a
    preemption. Its ranks end with 138 (128 + SIGUSR1), or with 143 (128 + SIGTERM) if other ranks
    stopped them before. After scancel they also end with 143, but the job is not RUNNING.
    """
    limit = settings.array_parallelism
    array = f"0-{len(jobs) - 1}" + (f"%{limit}" if limit else "")
    logs = f"{folder.absolute() / LOGS}/%x_%a.log"
    identity = {"job_name": path.stem, "array": array, "output": logs, "chdir": str(Path.cwd())}
    # Since Slurm 22.05 srun ignores the job's cpus-per-task, and gives a task one core.
    command = shlex.join(["srun", f"--cpus-per-task={options['cpus_per_task']}", *RUNNER])
    lines = [
        "#!/bin/bash",
        f"# Submit it with: sbatch {shlex.quote(str(path))}",
        *(_option(key, value) for key, value in {**identity, **options}.items()),
        "",
        "runs=(",
        *(f"  {_double_quoted(shlex.join(rank_arguments(job)))}" for job in jobs),
        ")",
        *settings.setup,
        'eval "words=(${runs[$SLURM_ARRAY_TASK_ID]})"',
        f'{command} "${{words[@]}}"',
        "code=$?",
        'if [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; then',
        # The array has the same number as its last element, so SLURM_JOB_ID may mean all jobs.
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
    """Return a text in double quotes for bash; it holds single quotes already."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
