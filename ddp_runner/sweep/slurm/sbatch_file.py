"""Writes sweep.sbatch, the job array of a sweep, for users who submit it themselves. Torch-free."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_runner.files import replace_file
from ddp_runner.job import Job
from ddp_runner.sweep.slurm.jobs import LOGS, RUNNER, resuming_words
from ddp_runner.sweep.slurm.settings import SlurmSettings, after_srun, srun_options


def write_sbatch_file(
    path: Path,
    jobs: Sequence[Job],
    *,
    options: Mapping[str, str | int | bool],
    settings: SlurmSettings,
) -> None:
    """Write a script for sbatch that runs frozen jobs of one shape; see ``jobs.submit``."""
    folder = path.parent.absolute()
    at_once = settings.array_parallelism
    array = f"0-{len(jobs) - 1}" + (f"%{at_once}" if at_once else "")
    logs = f"{folder / LOGS}/%A_%a.log"
    named = {"job_name": folder.name, "array": array, "output": logs, "chdir": str(Path.cwd())}
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
