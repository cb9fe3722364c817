"""The launcher that Hydra's sweepers use: composes every job of a batch, then hands over the batch.

Hydra's own launcher composes a job when its turn comes, so that editing a YAML meanwhile changes
the jobs that wait. Hydra finds this module by itself: it looks for plug-ins in this namespace.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from ddp_runner.cli.hydra_adapter import job_composer
from ddp_runner.cli.resume import resumed_overrides
from ddp_runner.config.load import as_written


@runtime_checkable
class BatchTask(Protocol):
    """A task function that runs all jobs of a batch by itself."""

    def run_batch(self, composing: Iterable[DictConfig]) -> Sequence[float | str | None]:
        """Run the jobs, composed with their hydra node one by one; return their objectives."""


class SweepLauncher(Launcher):
    """Gives a batch of jobs to the task function, as a whole if it is a ``BatchTask``.

    Hydra passes the launcher's own keys, which a ``BatchTask`` reads from the config.
    """

    def __init__(self, **_: Any) -> None: ...

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what composes the jobs and what runs them."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose every job, run them, and return how each ended."""
        setup_globals()
        loader, first = self._context.config_loader, initial_job_idx
        if not isinstance(self._task, BatchTask):
            alone = [loader.load_sweep_config(self._config, list(one)) for one in job_overrides]
            return [self._run_alone(_numbered(*one)) for one in enumerate(alone, start=first)]
        # Optuna's sweeper repeats there what each failed job has printed already.
        logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)
        composing = map(self._composer(), job_overrides)
        objectives = self._task.run_batch(map(_numbered, count(first), composing))
        results = zip(job_overrides, objectives, strict=True)
        return [_result(overrides, objective) for overrides, objective in results]

    def _composer(self) -> Callable[[Sequence[str]], DictConfig]:
        """Return what composes a job; one that resumes a run gets the groups of that run."""
        compose_job = job_composer(self._context.config_loader, self._config)
        sources = self._config.hydra.runtime.config_sources
        folders = [Path(one.path) for one in sources if one.schema == "file"]

        def composed(overrides: Sequence[str]) -> DictConfig:
            whole, implied = resumed_overrides(overrides, folders=folders)
            job = compose_job(whole)
            if implied:
                written = as_written(job.hydra.overrides.task)
                job.hydra.overrides.task = [one for one in written if one not in implied]
            return job

        return composed

    def _run_alone(self, job: DictConfig) -> JobReturn:
        """Run one job of another program, as Hydra's basic launcher does."""
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        result = run_job(
            hydra_context=self._context,
            task_function=self._task,
            config=job,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        return result


def _numbered(number: int, job: DictConfig) -> DictConfig:
    """Return a composed job with its number in the sweep."""
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    return job


def _result(overrides: Sequence[str], objective: float | str | None) -> JobReturn:
    """Return what a sweeper is to know of a job; not its config: a sweep may have thousands.

    Always report COMPLETED: a FAILED job makes Hydra abort the sweep. Optuna counts an objective
    that is not a number, such as a failure's sentence, as a failed trial; NaN would end the study.
    """
    result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    result.return_value = objective
    return result
