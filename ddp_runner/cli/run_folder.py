"""Which folder the user names for a run."""

from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.cli.compose import UNNAMED
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking.claims import AUTO


def asked_folder(composed: DictConfig, job: Job) -> Path | None:
    """Return the folder that the user names, by resume or hydra.run.dir; None if the runner does.

    Raises:
        UserError: the two differ.
    """
    resume, run_dir = job.config.resume, str(composed.hydra.run.dir)
    asked = None if run_dir == UNNAMED else Path(run_dir).absolute()
    if resume in (None, AUTO):
        return asked
    resumed = Path(resume).absolute()
    if asked is not None and asked.resolve() != resumed.resolve():
        raise UserError(
            f"hydra.run.dir ({asked}) and resume ({resume}) name two folders; leave "
            "hydra.run.dir out: a run goes on in its own"
        )
    return resumed
