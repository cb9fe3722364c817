"""Writes sweep.sbatch, the job array of a sweep, for users who submit it themselves. Torch-free."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_runner.files import replace_file
from ddp_runner.job import Job
from ddp_runner.sweep.slurm_jobs import LOGS, run_arguments
from ddp_runner.sweep.slurm_settings import SlurmSettings, after_srun


def write_sbatch_file(
    path: Path,
    jobs: Sequence[Job],
    *,
    options: Mapping[str, str | int | bool],
    settings: SlurmSettings,
    at_once: int,
) -> None:
    """Write a script for sbatch that runs frozen jobs of one shape; see ``slurm_jobs.submit``."""
    folder = path.parent.absolute()
    array = f"0-{len(jobs) - 1}%{at_once}"
    logs = f"{folder / LOGS}/%A_%a.log"
    named = {"job_name": folder.name, "array": array, "output": logs, "chdir": str(Path.cwd())}
    lines = [_option(key, value) for key, value in {**named, **options}.items()]
    commands = [shlex.join(run_arguments(job)) for job in jobs]
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# Submit it with: sbatch {shlex.quote(str(path))}",
            *lines,
            "",
            "runs=(",
            *(f"  {shlex.quote(command)}" for command in commands),
            ")",
            *settings.setup,
            'eval "srun ${runs[$SLURM_ARRAY_TASK_ID]}"',
            *after_srun(settings),
            "",
        ]
    )
    replace_file(path, text)


def _option(key: str, value: str | int | bool) -> str:
    name = f"#SBATCH --{key.replace('_', '-')}"
    return name if value is True else f"{name}={shlex.quote(str(value))}"
