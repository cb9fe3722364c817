"""A command with -m: its folder, its batches of jobs, its table and its exit code. Torch-free.

Hydra's sweeper composes the jobs. A grid is one batch; a sweeper that searches, such as Optuna's,
sends one batch after another and chooses each by the results of the last.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.load import to_config
from ddp_runner.config.schema import Config
from ddp_runner.config.sections import SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.host.streams import line_width
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.calibration import calibrations
from ddp_runner.sweep.dry_run import job_list
from ddp_runner.sweep.executor import Executor, Place
from ddp_runner.sweep.jobs import Batch, freeze_unheld
from ddp_runner.sweep.ledger import INVALID, Entry, Ledger
from ddp_runner.sweep.planning import Planned, Planner, validate_resumed
from ddp_runner.sweep.results import objective_of, print_report, sweep_table
from ddp_runner.sweep.sweep_dir import sweep_command
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import fact_lines, shown_path

NOTE_EVERY = 1000  # jobs, which take about a minute to plan


class StopSweep(BaseException):
    """No further batch is to run: a signal came, or too many jobs of a search have failed.

    Not an Exception: a sweeper may catch those and ask for the next batch.
    """


class Sweep:
    """The task that Hydra's launcher is given; its state is what lasts from batch to batch.

    Args:
        folder: of the sweep.
        arguments: the command line as the user wrote it.
        executor: runs the jobs.
        is_search: whether the sweeper chooses jobs by the results of earlier jobs.
        plan: resolves the composed config of a job, for the place that the executor gives it.
        name_of: gives the name of its folder.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        executor: Executor,
        is_search: bool,
        plan: Callable[[DictConfig, Callable[[Config], Place]], Job],
        name_of: Callable[[DictConfig], str],
    ) -> None:
        self._folder, self._ledger = folder, Ledger(folder)
        self._command, self._is_search = sweep_command(arguments), is_search
        self._executor = executor
        self._planner = Planner(folder, executor, is_search, plan_job=plan, name_of=name_of)
        self._settings = SweepConfig()
        self._accepted: dict[str, SweepConfig] = {}  # by what the executor has accepted, as text
        self._known_failures: list[str] | None = None  # None: no batch has begun
        self._outcomes: list[Outcome] = []
        self._listed: list[Planned] = []  # by a dry run

    def __call__(self, composed: DictConfig) -> None:
        """Reject a launcher that runs one job at a time: it would bypass the ledger."""
        raise UserError(
            "a sweep needs hydra/launcher=ddp_runner or hydra/launcher=slurm; leave hydra/launcher "
            "out"
        )

    def run(self, run_hydra: Callable[["Sweep"], None]) -> int:
        """Run the sweep, print its table, and its report if sweep.report is set.

        Args:
            run_hydra: lets Hydra's sweeper and launcher call ``run_batch``.

        Returns:
            The exit code of the worst job; a sweep whose jobs are all skipped is invalid.

        Raises:
            UserError: the sweep is invalid, or the search has no best job.
        """
        try:
            run_hydra(self)
        except StopSweep:
            pass
        except ValueError as error:
            # Optuna asks for the best trial at the end, and raises a plain one if there is none.
            is_completed = any(one.status == Status.COMPLETED for one in self._outcomes)
            if (
                type(error) is ValueError
                and self._is_search
                and self._known_failures is not None
                and not is_completed
            ):
                raise UserError(
                    "the search has no best job, since none was completed; see the sentences above"
                ) from error
            raise
        finally:
            self._executor.close()
            if self._known_failures is not None:
                self._ledger.fold()
                print(sweep_table(self._folder, width=line_width(sys.stdout)), flush=True)
        if self._listed:
            self._list()
        worst = max((one.exit_code for one in self._outcomes), default=None)
        if self._known_failures is None:  # a dry run, or a sweeper that had no job
            return worst or EXIT_COMPLETED
        if worst is None and self._executor.starts_jobs:
            worst = EXIT_USER_ERROR
            print_error(
                "every job of the sweep is invalid and was skipped; see the sentences above"
            )
        if self._settings.report:
            print_report(self._folder, self._ledger.read().values())
        return worst or EXIT_COMPLETED

    def run_batch(self, composing: Iterable[DictConfig]) -> list[float | str | None]:
        """Plan and freeze all jobs of a batch, then run them; return their objectives.

        Args:
            composing: composes one job after the other; each config has its ``hydra`` node.

        Returns:
            For each job the metric `sweep.objective`, or None if the sweep has no objective. For a
            job that was not completed the reason, as text.

        Raises:
            StopSweep: a signal came, or too many jobs of a search have failed.
        """
        planned = list[Planned]()
        for one in composing:
            if not planned and self._known_failures is None and not self._listed:
                print(fact_lines({"sweep": str(shown_path(self._folder))}), flush=True)
            self._settings = self._validated(one)
            planned.append(self._planner.plan(one))
            if len(planned) % NOTE_EVERY == 0:
                print(f"{len(planned)} jobs are planned", flush=True)
        if not planned:
            raise UserError("the sweep has no job: a range is empty; write range(3) or 1,2")
        if self._settings.dry_run:
            self._listed += planned
            if self._is_search:
                raise StopSweep
            return [None] * len(planned)
        validate_resumed(planned, skip_invalid=self._settings.skip_invalid)
        if self._known_failures is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            RunDir(self._folder).ensure_writable()
            self._known_failures = self._ledger.begin(
                command=self._command, retry_failed=self._settings.retry == "failed"
            )
        jobs = self._queue(planned)
        batch = Batch(jobs, self._ledger, self._settings, self._known_failures)
        if jobs:
            self._outcomes += self._executor.run(batch)
            if self._outcomes and self._outcomes[-1].status == Status.PREEMPTED:
                raise StopSweep
        if self._is_search and batch.has_failed():
            raise StopSweep
        name, entry = self._settings.objective, self._ledger.entry
        if name is None:
            return [None] * len(planned)
        return [  # another launcher may have removed the entry of an invalid job
            one.fault or objective_of(entry(one.job_id), self._folder, name=name) for one in planned
        ]

    def _validated(self, composed: DictConfig) -> SweepConfig:
        """Return how the sweep of a composed job runs, after the executor has accepted that."""
        names = ["sweep", "launch", "backend"]
        parts = [OmegaConf.to_container(composed[name]) for name in names]
        key = json.dumps(parts, default=str)
        if key not in self._accepted:  # of most sweeps these parts are the same in all jobs
            config = to_config(OmegaConf.masked_copy(composed, names))
            self._executor.validate(config, searches=self._is_search)
            self._accepted[key] = config.sweep
        return self._accepted[key]

    def _sorted(self, planned: Sequence[Planned]) -> tuple[dict[str, Job], list[Entry]]:
        """Return the valid jobs by their id, and the invalid ones."""
        jobs, invalid = dict[str, Job](), list[Entry]()
        status = Status.SKIPPED if self._settings.skip_invalid else Status.FAILED
        for one in planned:
            if one.job is not None:
                jobs.setdefault(one.job_id, one.job)
                continue
            invalid.append(Entry(one.job_id, one.name, status, INVALID, one.fault))
            if status == Status.FAILED:
                self._outcomes.append(Outcome.invalid(self._folder / one.name, one.fault))
        if self._settings.calibrate:
            jobs = calibrations(jobs.values(), folder=self._folder) | jobs
        return jobs, invalid

    def _list(self) -> None:
        """Print what the sweep would run, and with which rules it is invalid."""
        jobs, invalid = self._sorted(self._listed)
        known, width = self._ledger.read(), line_width(sys.stdout)
        print(job_list(jobs, invalid, known=known, executor=self._executor, width=width))
        if self._is_search:
            print(
                "a search chooses its later jobs by the results of these, so "
                f"{shown_path(self._folder)} may get others besides"
            )

    def _queue(self, planned: Sequence[Planned]) -> dict[str, Job]:
        """Return the jobs by their id, each frozen in its folder."""
        folder = self._folder
        jobs, invalid = self._sorted(planned)
        names = {one.job_id: one.name for one in planned}
        for entry in invalid:
            if entry.status == Status.FAILED:
                print_error(f"{shown_path(Path(entry.folder))}: {entry.sentence}")
        entries = self._ledger.queue(
            {job_id: names.get(job_id, job.title) for job_id, job in jobs.items()},
            invalid=invalid,
        )
        total = max((job.number for job in jobs.values()), default=0)
        for job_id, named in jobs.items():
            name, status = entries[job_id].folder, entries[job_id].status
            run_dir = folder / name
            run_dir.mkdir(exist_ok=True)
            place = f"job {named.number} of {total}" if named.number else "calibration"
            job = replace(named, run_dir=run_dir, title=f"{place}: {shown_path(Path(name))}")
            jobs[job_id] = job
            if self._is_search and named.number and status == Status.COMPLETED:
                print(f"\n{job.title} was run before: its result is taken", flush=True)
            if status == Status.QUEUED and not Path(name).is_absolute():  # a run has its config
                freeze_unheld(job)
        return jobs
