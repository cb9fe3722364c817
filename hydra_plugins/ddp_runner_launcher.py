"""The launcher that Hydra's sweepers use: composes every job of a batch, then hands over the batch.

Hydra's own launcher composes a job when its turn comes, so that editing a YAML meanwhile changes
the jobs that wait. Hydra finds this module by itself: it looks for plug-ins in this namespace.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

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
        jobs = list[DictConfig]()

        def composing() -> Iterator[DictConfig]:
            for number, overrides in enumerate(job_overrides, start=initial_job_idx):
                job = self._context.config_loader.load_sweep_config(self._config, list(overrides))
                with open_dict(job):
                    job.hydra.job.id = job.hydra.job.num = number
                jobs.append(job)
                yield job

        if not isinstance(self._task, BatchTask):
            return [self._run_alone(job) for job in list(composing())]
        # Optuna's sweeper repeats there what each failed job has printed already.
        logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)
        objectives = self._task.run_batch(composing())
        return [_result(job, value) for job, value in zip(jobs, objectives, strict=True)]

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


def _result(job: DictConfig, objective: float | str | None) -> JobReturn:
    """Return what Hydra is to know of a job.

    Always report COMPLETED: a FAILED job makes Hydra abort the sweep. Optuna counts an objective
    that is not a number, such as a failure's sentence, as a failed trial; NaN would end the study.
    """
    task = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
    result = JobReturn(
        overrides=as_written(job.hydra.overrides.task),
        cfg=task,
        hydra_cfg=OmegaConf.masked_copy(job, "hydra"),
        working_dir=str(Path.cwd()),  # a job of this program never changes the folder
        task_name=job.hydra.job.name,
        status=JobStatus.COMPLETED,
    )
    result.return_value = objective
    return result
