"""Which folder a run takes: the one that the user names, an unfinished run's, or a new one."""

from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.cli.compose import UNNAMED
from ddp_runner.config.schema import work_hash
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking.claims import AUTO
from ddp_runner.tracking.launch_marks import find_unfinished_run, is_same_work
from ddp_runner.tracking.outputs import claim, run_folder, sibling_runs
from ddp_runner.tracking.run_dir import RunDir


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


def new_folder(job: Job) -> Path:
    """Return the folder of an unfinished run, if the job may resume one, else a new folder."""
    if job.config.resume == AUTO:
        work = work_hash(job.config)
        unfinished = find_unfinished_run(sibling_runs(job.config), work=work)
        if unfinished is not None:
            return unfinished.path.absolute()
    return claim(run_folder(job.config)).absolute()


def goes_on(job: Job, run_dir: RunDir) -> bool:
    """Return whether resume=auto finds the same work in the folder, which must be locked.

    Raises:
        UserError: the folder holds another run.
    """
    resume = job.config.resume
    if resume == AUTO and is_same_work(run_dir, work=work_hash(job.config)):
        return True
    if resume in (None, AUTO) and run_dir.record.exists():
        raise UserError(
            f"{run_dir} already holds a run; give another folder, or {run_dir.resume_argument}"
        )
    return False
