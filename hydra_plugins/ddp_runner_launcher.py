"""Hydra's side of a sweep: composes every job of a batch, and hands them over as one.

Hydra's own launcher composes a job when its turn comes, so that a YAML edited meanwhile changes the
jobs that wait. Sweepers (grid, glob, range, Optuna) are Hydra's. Hydra finds this
module by itself, and takes launchers from this namespace only.
"""

import logging
from collections.abc import Callable, Sequence

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class SweepLauncher(Launcher):
    """Gives all jobs of a batch to the task function's `run_batch`."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take note of what composes the jobs."""
        self._loader, self._config = hydra_context.config_loader, config
        # Takes the composed configs, each with its hydra node; returns their objectives.
        self._run_batch: Callable[..., Sequence[float | str | None]] = vars(task_function)[
            "run_batch"
        ]
        self._searches = config.hydra.sweeper._target_ != GRID
        logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # jobs tell how they failed

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose every job, run them, and return the objective of each."""
        setup_globals()
        jobs = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            job = self._loader.load_sweep_config(self._config, list(overrides))
            with open_dict(job):
                job.hydra.job.id = job.hydra.job.num = number
            jobs.append(job)
        objectives = self._run_batch(jobs, searches=self._searches)
        # Said to have failed, a job would end the sweep. A search takes what is no number, such as
        # the sentence of a failure, for a job that failed; NaN would end Optuna's.
        return [
            JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED, _return_value=value)
            for overrides, value in zip(job_overrides, objectives, strict=True)
        ]
