"""Plans the jobs of a sweep, each with its folder, or with why it is invalid. Torch-free.

Most jobs are new runs, in the sweep's folder. A job that resumes a run goes on in that run's own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.config.identity import config_hash, digest
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.sweep.executor import Executor, Place
from ddp_runner.sweep.ledger import INVALID
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import shown_path


@dataclass(frozen=True)
class Planned:
    """A job of a batch, or why it is invalid."""

    job_id: str
    name: str  # of its folder, as in ``ledger.Entry``
    job: Job | None = None
    fault: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on with a run, in that run's folder."""
        return Path(self.name).is_absolute()


@dataclass
class Planner:
    """Plans one job after the other; for the fields see ``multirun.Sweep``."""

    folder: Path
    executor: Executor
    is_search: bool
    plan_job: Callable[[DictConfig, Callable[[Config], Place]], Job]
    name_of: Callable[[DictConfig], str]
    resumed: set[Path] = field(default_factory=set)

    def plan(self, composed: DictConfig) -> Planned:
        """Return a job, or why it is invalid; a composed config is large and is not kept.

        Raises:
            UserError: several jobs would go on with one run.
        """
        name = self.name_of(composed)
        if Path(name).is_absolute():
            self._validate_alone(Path(name))
        try:
            job = self.plan_job(composed, self.executor.place)
        except UserError as error:
            return Planned(f"{INVALID}: {name}", name, fault=str(error))
        number, title = composed.hydra.job.num + 1, str(shown_path(Path(name)))
        job = replace(job, run_dir=self.folder / name, number=number, title=title)
        # A run's config changes as it goes on, so its job is known by what the command says. The
        # name counts as well: two jobs may differ only in how their ranks start.
        identity = digest(job.overrides) if Path(name).is_absolute() else config_hash(job.config)
        return Planned(f"{identity} {name}", name, job)

    def _validate_alone(self, run: Path) -> None:
        if self.is_search or run.resolve() in self.resumed:
            shown = RunDir(shown_path(run)).resume_argument
            raise UserError(
                f"{shown} goes on with one run, in its own folder, and several jobs of this sweep "
                f"would; to start each from its weights, choose the run's groups and write "
                f"++model.weights={shown_path(run)} in place of resume"
            )
        self.resumed.add(run.resolve())


def validate_resumed(planned: Iterable[Planned], *, skip_invalid: bool) -> None:
    """Reject a batch if one of its runs cannot go on, before another one does.

    Raises:
        UserError: a run does not exist, is in use, or cannot be resumed as asked.
    """
    for one in planned:
        if not one.goes_on:
            continue
        if one.fault and not skip_invalid:
            raise UserError(one.fault)
        if one.job is not None:
            with RunDir(Path(one.name)).locked():
                continue
