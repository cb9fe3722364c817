"""The batches of a sweep: jobs are planned, frozen, queued in the ledger, and run. Torch-free."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.load import to_config
from ddp_runner.config.schema import SweepConfig, config_hash
from ddp_runner.errors import UserError
from ddp_runner.host.fork_server import start_fork_server
from ddp_runner.host.hardware import Hardware, detect
from ddp_runner.host.streams import has_live_line, print_line
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.launch.launcher import launch, print_error
from ddp_runner.sweep.calibration import calibrations
from ddp_runner.sweep.jobs import failed_enough, recorded, run_jobs
from ddp_runner.sweep.ledger import INVALID, UNFINISHED, Entry, Ledger, sweep_command
from ddp_runner.sweep.results import objective_of, print_report
from ddp_runner.sweep.slots import Batch, Slots
from ddp_runner.sweep.table import sweep_table
from ddp_runner.sweep.validate import validate_sweep
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_dir import InUseError, RunDir


class StopSweep(BaseException):
    """No further batch is to run: a signal came, or too many jobs of a search have failed.

    Not an Exception: a sweeper may catch those and ask for the next batch.
    """


class Sweep:
    """The task that Hydra's launcher is given; its state is what lasts from batch to batch.

    Args:
        folder: of the sweep.
        arguments: the command line as the user wrote it.
        is_search: whether the sweeper chooses jobs by the results of earlier jobs.
        plan: resolves the composed config of a job.
        name_of: gives the name of its folder.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        is_search: bool,
        plan: Callable[[DictConfig, Hardware], Job],
        name_of: Callable[[DictConfig], str],
    ) -> None:
        self.folder = folder
        self.is_search = is_search
        self._command = sweep_command(arguments)
        self._plan, self._name_of = plan, name_of
        self._hardware = detect()
        self._has_header = False  # whether a job of this command has shown it
        self._ledger = Ledger(folder)
        self._settings = SweepConfig()
        self._known_failures: list[str] | None = None  # None: no batch has begun
        self._outcomes: list[Outcome] = []
        self._slots: Slots | None = None

    def __call__(self, composed: DictConfig) -> None:
        """Refuse a launcher that runs one job at a time: it would pass by the ledger."""
        raise UserError("a sweep needs hydra/launcher=ddp_runner; leave hydra/launcher out")

    @property
    def has_begun(self) -> bool:
        """Whether a batch was queued."""
        return self._known_failures is not None

    @property
    def has_completed(self) -> bool:
        """Whether a job was completed, now or in an earlier start of the sweep."""
        return any(outcome.status == Status.COMPLETED for outcome in self._outcomes)

    @property
    def exit_code(self) -> int:
        """The worst job's; a sweep whose jobs are all skipped is invalid."""
        if self.has_begun and not self._outcomes:
            return EXIT_USER_ERROR
        return max((outcome.exit_code for outcome in self._outcomes), default=EXIT_COMPLETED)

    def _execute(self, job: Job) -> Outcome:
        """Run a job; on a terminal rank 0 shows its line, and replaces it by the result."""
        shows_header, self._has_header = not self._has_header, True
        is_live = has_live_line(sys.stdout)
        if shows_header or not is_live:
            print(f"\n{job.title}" if not is_live else "", flush=True)
        outcome = launch(replace(job, shows_header=shows_header))
        if is_live and outcome.status == Status.FAILED:
            print_line(f"{job.title}  failed", stream=sys.stdout)
        return outcome

    def close(self) -> None:
        """End the slots, if there are any, and print the table, if a batch has begun."""
        if self._slots is not None:
            self._slots.close()
        if self.has_begun:
            print(sweep_table(self.folder), flush=True)

    def report(self) -> None:
        """Print what was skipped, and compare the runs if sweep.report is set."""
        if not self.has_begun:
            return
        if not self._outcomes:
            print_error(
                "every job of the sweep is invalid and was skipped; see the sentences above"
            )
        if not self._settings.report:
            return
        print_report(self.folder, self._ledger.read().values())

    def run_batch(self, composed: Sequence[DictConfig]) -> list[float | str | None]:
        """Plan and freeze all jobs of a batch, then run them; return their objectives.

        Args:
            composed: the config of each job, with its ``hydra`` node.

        Returns:
            For each job the metric `sweep.objective`, or None if the sweep has no objective. For a
            job that was not completed the reason, as text.

        Raises:
            StopSweep: a signal came, or too many jobs of a search have failed.
        """
        if not composed:
            raise UserError("the sweep has no job: a range is empty; write range(3) or 1,2")
        parts = ["sweep", "launch", "backend"]
        configs = [to_config(OmegaConf.masked_copy(one, parts)) for one in composed]
        for config in configs:
            validate_sweep(config, self._hardware, searches=self.is_search)
        self._settings = configs[-1].sweep
        if self._known_failures is None:
            self._known_failures = self._begin()
        jobs, order = self._queue(composed)
        if jobs and self._settings.parallel_jobs == 1:
            self._run_in_turn(jobs)
        elif jobs:
            self._run_side_by_side(jobs)
        entries = self._ledger.read()
        if self.is_search and failed_enough(entries, self._settings, self._known_failures):
            raise StopSweep
        name = self._settings.objective
        return [objective_of(entries[job_id], self.folder, name=name) for job_id in order]

    def _begin(self) -> list[str]:
        """Open the ledger; return the ids of the jobs that have failed before and stay so."""
        self.folder.mkdir(parents=True, exist_ok=True)
        RunDir(self.folder).ensure_writable()
        return self._ledger.begin(
            command=self._command, retry_failed=self._settings.retry == "failed"
        )

    def _queue(self, composed: Sequence[DictConfig]) -> tuple[dict[str, Job], list[str]]:
        """Return the jobs by their id, planned and frozen, and the id of each composed config."""
        settings, folder = self._settings, self.folder
        share = self._hardware.share(settings.parallel_jobs)
        jobs, invalid, order = dict[str, Job](), list[Entry](), list[str]()
        for one in composed:
            name = self._name_of(one)
            try:
                job = self._plan(one, share)
                # With its name: two jobs may differ only in how their ranks start.
                job_id = f"{config_hash(job.config)} {name}"
                number = one.hydra.job.num + 1
                jobs.setdefault(job_id, replace(job, run_dir=folder / name, number=number))
            except UserError as error:
                job_id = f"{INVALID}: {name}"
                status = Status.SKIPPED if settings.skip_invalid else Status.FAILED
                invalid.append(Entry(job_id, name, status, INVALID, str(error)))
                if not settings.skip_invalid:
                    print_error(f"{name}: {error}")
                    self._outcomes.append(Outcome.invalid(folder / name, str(error)))
            order.append(job_id)
        if settings.calibrate:
            jobs = calibrations(jobs.values()) | jobs
        entries = self._ledger.queue(
            {job_id: job.run_dir.name for job_id, job in jobs.items() if job.run_dir},
            invalid=invalid,
        )
        total = max((job.number for job in jobs.values()), default=0)
        for job_id, planned in jobs.items():
            run_dir, status = folder / entries[job_id].folder, entries[job_id].status
            run_dir.mkdir(exist_ok=True)
            place = f"job {planned.number} of {total}" if planned.number else "calibration"
            job = replace(planned, run_dir=run_dir, title=f"{place}: {run_dir.name}")
            jobs[job_id] = job
            if self.is_search and planned.number and status == Status.COMPLETED:
                print(f"\n{job.title} was run before: its result is taken", flush=True)
            if status == Status.QUEUED:
                _freeze(job, run_dir)
        return jobs, order

    def _run_in_turn(self, jobs: dict[str, Job]) -> None:
        """Run what is left of a batch, one job after the other."""
        start_fork_server()
        self._outcomes += run_jobs(
            jobs,
            ledger=self._ledger,
            settings=self._settings,
            execute=self._execute,
            known_failures=self._known_failures or (),
        )
        if self._outcomes and self._outcomes[-1].status == Status.PREEMPTED:
            raise StopSweep

    def _run_side_by_side(self, jobs: dict[str, Job]) -> None:
        """Run what is left of a batch in parallel slots."""
        settings, known_failures = self._settings, self._known_failures or ()
        if self._slots is None:
            self._slots = Slots(settings.parallel_jobs, self._hardware)
        received = self._slots.run(Batch(jobs, self._ledger, settings, known_failures))
        entries = self._ledger.read()
        self._outcomes += [
            recorded(entries[job_id], job.run_dir)
            for job_id, job in jobs.items()
            if entries[job_id].status in (Status.COMPLETED, Status.FAILED)
        ]
        if received is not None:
            self._outcomes.append(Outcome(Status.PREEMPTED, 128 + received))
            raise StopSweep
        left = [one for one in jobs if entries[one].status in UNFINISHED]
        if left and not failed_enough(entries, settings, known_failures):
            # All slots have ended early; each has printed why.
            self._outcomes.append(Outcome(Status.FAILED, EXIT_FAILED))


def _freeze(job: Job, run_dir: Path) -> None:
    """Freeze a job's config, unless another launcher holds the job: it freezes the same config."""
    with suppress(InUseError), RunDir(run_dir).locked():
        freeze(job, RunDir(run_dir))
