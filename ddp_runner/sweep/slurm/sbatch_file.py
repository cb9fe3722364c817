"""Writes the script for sbatch that runs the jobs of a sweep as an array. Torch-free."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_runner.files import replace_file
from ddp_runner.job import Job
from ddp_runner.sweep.slurm.settings import SlurmSettings, after_srun, srun_options
from ddp_runner.tracking.run_dir import RunDir

LOGS = "slurm"  # in the sweep's folder: what the jobs print, and the scripts that were submitted
RUNNER = (sys.executable, "-m", "ddp_runner")


def resuming_words(job: Job) -> list[str]:
    """Return the words by which each rank of a job finds its frozen config, and what it lacks."""
    assert job.run_dir is not None
    (override,) = shlex.split(RunDir(job.run_dir.absolute()).resume_argument)
    return [override, *job.said_again]


def write_sbatch_file(
    path: Path,
    jobs: Sequence[Job],
    *,
    folder: Path,
    name: str,
    options: Mapping[str, str | int | bool],
    settings: SlurmSettings,
) -> None:
    """Write a script for sbatch that runs frozen jobs of one shape, under a name in the queue.

    For the other arguments see ``jobs.submit``.
    """
    at_once = settings.array_parallelism
    array = f"0-{len(jobs) - 1}" + (f"%{at_once}" if at_once else "")
    logs = f"{folder.absolute() / LOGS}/%A_%a.log"
    named = {"job_name": name, "array": array, "output": logs, "chdir": str(Path.cwd())}
    lines = [_option(key, value) for key, value in {**named, **options}.items()]
    command = shlex.join(["srun", *srun_options(options), *RUNNER])
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# Submit it with: sbatch {shlex.quote(str(path))}",
            *lines,
            "",
            "runs=(",
            *(f"  {_double_quoted(shlex.join(resuming_words(job)))}" for job in jobs),
            ")",
            *settings.setup,
            'eval "words=(${runs[$SLURM_ARRAY_TASK_ID]})"',
            f'{command} "${{words[@]}}"',
            *after_srun(settings),
            "",
        ]
    )
    replace_file(path, text)


def _option(key: str, value: str | int | bool) -> str:
    name = f"#SBATCH --{key.replace('_', '-')}"
    return name if value is True else f"{name}={shlex.quote(str(value))}"


def _double_quoted(text: str) -> str:
    """Return the words of a job as one word of bash; they hold single quotes already."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
