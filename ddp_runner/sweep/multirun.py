"""A command with ``-m``: its batches of jobs, from the composed configs to a table at the end.

Called by ``__main__``. A grid is one batch; a sweeper that searches sends one after another, each
chosen by what the last one gave. Torch-free.
"""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.load import to_config
from ddp_runner.config.schema import SweepConfig, config_hash
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware, detect
from ddp_runner.host.streams import has_live_line, print_line
from ddp_runner.job import EXIT_FAILED, EXIT_USER_ERROR, Job, Outcome, Status
from ddp_runner.launch.execute import execute, print_error
from ddp_runner.launch.fork_server import start_fork_server
from ddp_runner.sweep.calibration import calibrations
from ddp_runner.sweep.jobs import failed_enough, recorded, run_jobs
from ddp_runner.sweep.ledger import INVALID, UNFINISHED, Entry, Ledger, sweep_command
from ddp_runner.sweep.slots import Batch, Slots
from ddp_runner.sweep.table import sweep_table
from ddp_runner.sweep.validate import validate_sweep
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_dir import (
    InUseError,
    ensure_writable,
    locked,
)
from ddp_runner.tracking.run_record import read_run_record


class Multirun:
    """The sweep of one command.

    Args:
        plan: resolves a composed config, given the job's folder, its overrides and the hardware.
    """

    def __init__(self, plan: Callable[[DictConfig, Path, Any, Hardware], Job]) -> None:
        self.outcomes: list[Outcome] = []
        self._plan = plan
        self._settings = SweepConfig()
        self._ledger: Ledger | None = None
        self._known_failures: list[str] = []
        self._slots: Slots | None = None
        self._searches = False
        self._has_header = False  # whether a job of this command has shown it

    def __enter__(self) -> "Multirun":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the slots, if there are any, and print the table; nothing if no batch has begun.

        Raises:
            UserError: the search has no best job, since none was completed.
        """
        if self._slots is not None:
            self._slots.close()
        if self._ledger is None:
            return
        print(sweep_table(self._ledger.folder), flush=True)
        if error is None and not self.outcomes:
            print_error(
                "every job of the sweep breaks a rule and was skipped; see the sentences above"
            )
        found = any(outcome.status == Status.COMPLETED for outcome in self.outcomes)
        if self._searches and isinstance(error, ValueError) and not found:
            raise UserError(
                "the search has no best job, since none was completed; see the sentences above"
            ) from error

    def run_batch(
        self, composed: Sequence[DictConfig], *, searches: bool
    ) -> list[float | str | None]:
        """Plan and freeze all jobs of a batch, then run them; return their objectives.

        Args:
            composed: the config of each job, with its hydra node.
            searches: whether the sweeper chooses jobs by these objectives.

        Returns:
            For each job the metric `sweep.objective`, None where none is asked for; of a job that
            was not completed the reason.
        """
        if not composed:
            raise UserError("the sweep has no job: a range is empty; write range(3) or 1,2")
        hardware, self._searches = detect(), searches
        for one in composed:
            raw, node = opened(one)
            config = to_config(OmegaConf.masked_copy(raw, ["sweep", "launch", "backend"]))
            validate_sweep(config, hardware, searches=searches)
        self._settings, folder = config.sweep, Path(node.sweep.dir)
        ledger = self._begin(folder)
        jobs, order = self._queue(composed, ledger, hardware)
        if jobs:
            self._run(jobs, ledger, hardware)
        if searches and failed_enough(ledger.read(), self._settings, self._known_failures):
            sys.exit(self.exit_code)
        entries = ledger.read()
        return [self._objective(entries[job_id], folder) for job_id in order]

    def report(self) -> None:
        """Compare the runs, if that is asked for."""
        if not self._settings.report or self._ledger is None:
            return
        from ddp_runner.compare.__main__ import write_all
        from ddp_runner.compare.analysis import compare
        from ddp_runner.compare.render.tables import FORMATS
        from ddp_runner.compare.runs import read_runs

        folder = self._ledger.folder
        if not any(entry.status == Status.COMPLETED for entry in self._ledger.read().values()):
            print("\nno report: no run of this sweep was completed")
            return
        comparison = compare(read_runs([folder]))
        written = write_all(comparison, folder / "report")
        print("", FORMATS["table"](comparison), *written, sep="\n", flush=True)

    @property
    def exit_code(self) -> int:
        """The highest of the jobs'; one that was skipped has none, but not all may be skipped."""
        if not self.outcomes and self._ledger is not None:
            return EXIT_USER_ERROR
        return max((outcome.exit_code for outcome in self.outcomes), default=0)

    def _begin(self, folder: Path) -> Ledger:
        """Return the ledger; the first batch of a command opens it."""
        if self._ledger is None:
            folder.mkdir(parents=True, exist_ok=True)
            ensure_writable(folder)
            ledger = Ledger(folder)
            self._known_failures = ledger.begin(
                command=sweep_command(), retry_failed=self._settings.retry == "failed"
            )
            self._ledger = ledger
        return self._ledger

    def _queue(
        self, composed: Sequence[DictConfig], ledger: Ledger, hardware: Hardware
    ) -> tuple[dict[str, Job], list[str]]:
        """Return the jobs by their id, planned and frozen, and the id of each composed config."""
        settings, folder = self._settings, ledger.folder
        share = hardware.share(settings.parallel_jobs)
        jobs, refused, order = dict[str, Job](), list[Entry](), list[str]()
        for one in composed:
            raw, node = opened(one)
            name = node.sweep.subdir
            try:
                job = self._plan(raw, folder / name, node, share)
                # With its name: two jobs may differ in how their gangs start alone.
                job_id = f"{config_hash(job.config)} {name}"
                jobs.setdefault(job_id, replace(job, number=node.job.num + 1))
            except UserError as error:
                job_id = f"{INVALID}: {name}"
                status = Status.SKIPPED if settings.skip_invalid else Status.FAILED
                refused.append(Entry(job_id, name, status, INVALID, str(error)))
                if not settings.skip_invalid:
                    print_error(f"{name}: {error}")
                    self.outcomes.append(Outcome.invalid(folder / name, str(error)))
            order.append(job_id)
        if settings.calibrate:
            jobs = calibrations(jobs.values()) | jobs
        entries = ledger.queue(
            {job_id: job.run_dir.name for job_id, job in jobs.items() if job.run_dir},
            refused=refused,
        )
        total = max((job.number for job in jobs.values()), default=0)
        for job_id, planned in jobs.items():
            run_dir = folder / entries[job_id].folder
            run_dir.mkdir(exist_ok=True)
            place = f"job {planned.number} of {total}" if planned.number else "calibration"
            job = replace(planned, run_dir=run_dir, title=f"{place}: {run_dir.name}")
            jobs[job_id] = job
            if self._searches and planned.number and entries[job_id].status == Status.COMPLETED:
                print(f"\n{job.title} was run before: its result is taken", flush=True)
            if entries[job_id].status == Status.QUEUED:
                _freeze(job, run_dir)
        return jobs, order

    def _run(self, jobs: Mapping[str, Job], ledger: Ledger, hardware: Hardware) -> None:
        """Run what is left of a batch; leave the command if a signal asked for that."""
        settings, known_failures = self._settings, self._known_failures
        if settings.parallel_jobs == 1:
            start_fork_server()
            self.outcomes += run_jobs(
                jobs,
                ledger=ledger,
                settings=settings,
                execute=self._execute,
                known_failures=known_failures,
            )
            if self.outcomes and self.outcomes[-1].status == Status.PREEMPTED:
                sys.exit(self.exit_code)
            return
        if self._slots is None:
            self._slots = Slots(settings.parallel_jobs, hardware)
        received = self._slots.run(Batch(jobs, ledger, settings, known_failures))
        entries = ledger.read()
        self.outcomes += [
            recorded(entries[job_id], job.run_dir)
            for job_id, job in jobs.items()
            if entries[job_id].status in (Status.COMPLETED, Status.FAILED)
        ]
        if received is not None:
            self.outcomes.append(Outcome(Status.PREEMPTED, 128 + received))
            sys.exit(self.exit_code)
        left = [one for one in jobs if entries[one].status in UNFINISHED]
        if left and not failed_enough(entries, settings, known_failures):
            # All slots are gone, and have said so.
            self.outcomes.append(Outcome(Status.FAILED, EXIT_FAILED))

    def _execute(self, job: Job) -> Outcome:
        """Run a job; on a terminal rank 0 shows its line, and replaces it by the result."""
        shows_header, self._has_header = not self._has_header, True
        is_live = has_live_line(sys.stdout)
        if shows_header or not is_live:
            print(f"\n{job.title}" if not is_live else "", flush=True)
        outcome = execute(replace(job, shows_header=shows_header))
        if is_live and outcome.status == Status.FAILED:
            print_line(f"{job.title}  failed", stream=sys.stdout)
        return outcome

    def _objective(self, entry: Entry, folder: Path) -> float | str | None:
        """Return a metric of a completed job."""
        name = self._settings.objective
        if name is None:
            return None
        if entry.status != Status.COMPLETED:
            return entry.sentence or f"{entry.folder} is {entry.status}"
        metrics = read_run_record(folder / entry.folder).get("metrics", {})
        if name not in metrics:
            nearest = difflib.get_close_matches(name, metrics, n=1, cutoff=0.0)
            hint = f"write sweep.objective={nearest[0]}" if nearest else "it has none at all"
            raise UserError(f"sweep.objective ({name}) is not a metric of {entry.folder}; {hint}")
        if metrics[name] is None:
            return f"{entry.folder}: {name} is not a finite number"
        return float(metrics[name])


def _freeze(job: Job, run_dir: Path) -> None:
    """Freeze a job's config, unless another launcher has the job: then it freezes the very same."""
    with suppress(InUseError), locked(run_dir):
        freeze(job, run_dir)


def opened(job: DictConfig) -> tuple[DictConfig, Any]:
    """Return a composed job without its hydra node, and that node, for whose resolvers it is set.

    The job's ``hydra`` interpolations resolve until the next job is opened.
    """
    HydraConfig.instance().set_config(job)
    hydra_node = HydraConfig.get()
    return OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"]), hydra_node
