"""Plans the jobs of a batch: their configs and folders, or why they are invalid. Torch-free.

A job is a new run in the sweep's folder, or resumes a run in that run's folder.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.identity import RANK_KEYS, config_hash, digest
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import Config
from ddp_runner.config.sections import CollectivesConfig, SweepConfig
from ddp_runner.errors import UserError, listed
from ddp_runner.host.streams import print_line
from ddp_runner.job import Job, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.jobs import JobBatch, JobHardware, SweepJob, freeze_unheld, num_sessions
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.sweep_dir import (
    Plan,
    PlannedJob,
    change_plan,
    read_plan,
    sweep_command,
    with_jobs,
    without_stale_jobs,
)
from ddp_runner.tracking.alive import standing
from ddp_runner.tracking.outputs import job_name
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_folder_claim import changed_values
from ddp_runner.tracking.run_record import last_session_start, read_run_record
from ddp_runner.tracking.start_block import fact_lines, shown_path

NOTE_EVERY = 1000  # jobs between two progress lines; planning them takes some seconds

# A comparison fits latency and bandwidth over the sizes, so it needs many sizes and few calls.
ALL_REDUCE = CollectivesConfig(
    ops=["all_reduce"], reduce_ops=["sum"], min_bytes=4 * 2**10, size_factor=4, steps=20
)


@dataclass(frozen=True)
class SweepCommand:
    """The command line of a sweep, and the functions that turn it into jobs."""

    words: Sequence[str]  # as the user wrote them
    overrides: Sequence[str]  # all overrides, also those with several values
    read: Callable[[Sequence[str]], Sequence[Override]]  # parses overrides
    common: DictConfig  # the config that all jobs share, with the ``hydra`` node
    compose: Callable[[Sequence[str], int], DictConfig]  # from a job's words and its number from 0
    name_of: Callable[[DictConfig], str]  # folder name of a job, or path of the run that it resumes
    plan: Callable[[DictConfig, Callable[[Config], JobHardware]], Job]


@dataclass(frozen=True)
class Draft:
    """A planned job; `job` is None if it is invalid."""

    planned: PlannedJob
    job: Job | None = None


@dataclass
class Planner:
    """Plans the batches of one sweep."""

    command: SweepCommand
    folder: Path
    executor: Local | Slurm
    is_search: bool
    earlier: Path | None = None  # folder of an ended sweep of the same command
    settings: SweepConfig = field(default_factory=SweepConfig)  # of the last planned job
    queued: set[str] = field(default_factory=set)  # ids of all valid jobs
    num_jobs: int = 0  # of a new grid whose first jobs start before the rest is planned
    is_stopped: bool = False  # plan no more jobs
    _has_begun: bool = False  # a job has been composed
    _accepted: dict[str, SweepConfig] = field(default_factory=dict)
    _validated: DictConfig | None = None
    _resumed: set[Path] = field(default_factory=set)

    def draft(self, batch: Iterable[Sequence[str]], numbers: Iterable[int]) -> Iterator[Draft]:
        """Yield the jobs of a batch, from their words and their numbers, which count from 0.

        Raises:
            UserError: no job can be composed, or several jobs would resume the same run.
        """
        fault = None
        for done, (words, number) in enumerate(zip(batch, numbers, strict=False), start=1):
            if self.is_stopped:
                return
            try:
                composed = self.command.compose(words, number)
            except UserError as error:
                varied = [word for word in words if word not in self.command.overrides]
                yield self._invalid_draft(words, job_name(varied), error)
                fault = fault or error
                continue
            if not self._has_begun:  # before that, a mistake in the command prints only its error
                self._has_begun = True
                facts = {"sweep": str(shown_path(self.folder))}
                if self.earlier is not None:
                    facts["earlier"] = f"{shown_path(self.earlier)} of the same command has ended"
                print(fact_lines(facts), flush=True)
            self.validate(composed)
            yield self._draft(composed, words, number)
            if done % NOTE_EVERY == 0:
                print_line(f"{done} jobs are planned")
        if fault is not None and not self._has_begun:
            raise fault

    def _invalid_draft(self, words: Sequence[str], name: str, error: UserError) -> Draft:
        job_id = f"invalid: {digest(list(words))} {name}"
        return Draft(PlannedJob(job_id, name, str(error), self.settings.skip_invalid))

    def validate(self, composed: DictConfig) -> None:
        """Raise a UserError if the jobs cannot run with the settings of the sweep."""
        if composed is self._validated:  # reused for a job that differs only in plain keys
            return
        self._validated, names = composed, ["sweep", "launch", "backend"]
        parts = [OmegaConf.to_container(composed[name]) for name in names]
        key = json.dumps(parts, default=str)
        if key not in self._accepted:  # in most sweeps all jobs have the same
            config = to_config(OmegaConf.masked_copy(composed, names))
            self.executor.validate(config)
            self._accepted[key] = config.sweep
        self.settings = self._accepted[key]

    def _draft(self, composed: DictConfig, words: Sequence[str], number: int) -> Draft:
        name = self.command.name_of(composed)
        resumes = None
        if Path(name).is_absolute():
            self._validate_resumed_once(Path(name))
            resumes = last_session_start(read_run_record(Path(name), missing_ok=True))
        try:
            job = self.command.plan(composed, self.executor.hardware_of)
        except UserError as error:
            return self._invalid_draft(words, name, error)
        job = replace(job, number=number + 1)
        # A resume can change a run's config, so its job is identified by its command. Every id
        # contains the name: two jobs may differ only in how their ranks start.
        if resumes is not None:
            identity, folder = digest(sweep_command(job.overrides)), name
        else:
            identity = config_hash(job.config)
            folder = self._free_folder(name, identity)
        return Draft(PlannedJob(f"{identity} {name}", folder, resumes=resumes), job)

    def _free_folder(self, name: str, identity: str) -> str:
        """Return a folder without a run of another config; a deleted plan leaves such runs."""
        for number in count(1):
            folder = name if number == 1 else f"{name}-{number}"
            record = standing(RunDir(self.folder / folder)).record
            if record.get("config_hash", identity) == identity:
                return folder
        raise AssertionError

    def _validate_resumed_once(self, run: Path) -> None:
        if self.is_search or run.resolve() in self._resumed:
            shown = RunDir(shown_path(run)).resume_argument
            raise UserError(
                f"{shown} continues one run in its own folder, and several jobs of this sweep "
                "would resume it",
                "to start each job from its weights, choose the run's groups and "
                f"write ++model.weights={shown_path(run)} in place of resume",
            )
        self._resumed.add(run.resolve())

    def queue(self, drafts: Sequence[Draft]) -> JobBatch:
        """Write the jobs into the plan, freeze new jobs in their folders, and return all jobs."""
        jobs = self.jobs(drafts)
        before = read_plan(self.folder)
        plan = change_plan(self.folder, partial(self.planned, drafts))
        self.print_changes(before, plan, jobs)
        self.queued |= jobs.keys()
        for draft in drafts:
            if draft.job is None and not draft.planned.is_skipped:
                print_error(f"{shown_path(Path(draft.planned.folder))}: {draft.planned.fault}")
        total = self.num_jobs or max((job.number for job in jobs.values()), default=0)
        queued = dict[str, SweepJob]()
        for job_id, job in jobs.items():
            planned = plan.jobs[job_id]
            label = f"job {job.number} of {total}" if job.number else "calibration"
            if self.is_search and job.number:  # numbered from 0, as in Optuna's tools
                label = f"trial {job.number - 1}"
            title = f"{label}: {shown_path(Path(planned.folder))}"
            if self.is_stopped:  # the next start freezes what is queued
                break
            run_dir = self.folder / planned.folder
            run_dir.mkdir(exist_ok=True)
            titled = replace(job, run_dir=run_dir, title=title)
            current = planned.standing(self.folder)
            if self.is_search and job.number and current.status == Status.COMPLETED:
                print(f"\n{title} was run before: its result is taken", flush=True)
            if current.status == Status.QUEUED and planned.resumes is None:
                freeze_unheld(titled)
            sessions = num_sessions(current) if current.status == Status.FAILED else 0
            queued[job_id] = SweepJob(planned, titled, self.folder, sessions)
        return JobBatch(queued, self.settings)

    def planned(self, drafts: Sequence[Draft], plan: Plan) -> Plan:
        """Return the plan with the jobs of a batch; a grid drops jobs that it no longer makes."""
        jobs = {job_id: PlannedJob(job_id, job.title) for job_id, job in self.jobs(drafts).items()}
        jobs |= {draft.planned.job_id: draft.planned for draft in drafts}
        if not (self.is_search or self.num_jobs):
            plan = without_stale_jobs(self.folder, jobs, plan)
        return with_jobs(jobs.values(), plan)

    def print_changes(self, before: Plan, plan: Plan, jobs: Mapping[str, Job]) -> None:
        """Print which jobs of the plan `before` the edit of a YAML has replaced or dropped."""
        if self.is_search or self.num_jobs:
            return
        new = {plan.jobs[job_id].name: job_id for job_id in jobs}
        same = {job.name for job_id, job in before.jobs.items() if job_id in jobs}
        gone = {
            job.name: job
            for job_id, job in before.jobs.items()
            if job_id not in jobs and job.name not in same and job.fault is None
        }
        if changed := [name for name in new if name in gone]:
            old = RunDir(self.folder / gone[changed[0]].folder)
            config = jobs[new[changed[0]]].config
            values = changed_values(config, old) if old.is_frozen else {}
            keys = [key for key in values if key not in RANK_KEYS]
            folders = [(plan.jobs[new[name]].folder, gone[name].folder) for name in changed]
            shown = [now if now == then else f"{now} in place of {then}" for now, then in folders]
            print(
                f"changed since this sweep began: {listed(keys) or 'how its jobs are made'}; "
                f"so these are new jobs: {listed(shown, separator='; ')}",
                flush=True,
            )
        if dropped := [job.folder for name, job in gone.items() if name not in new]:
            names = listed(dropped, separator="; ")
            print(f"no longer made by the sweep's command: {names}", flush=True)

    def jobs(self, drafts: Iterable[Draft]) -> dict[str, Job]:
        """Return the valid jobs by id, calibrations first."""
        jobs = dict[str, Job]()
        for draft in drafts:
            if draft.job is not None:
                name = str(shown_path(Path(draft.planned.folder)))
                jobs.setdefault(draft.planned.job_id, replace(draft.job, title=name))
        if self.settings.calibrate:
            return calibrations(jobs.values()) | jobs
        return jobs


def validate_resumed(drafts: Iterable[Draft], *, skip_invalid: bool) -> None:
    """Raise a UserError if a run that the batch resumes is missing, in use, or not resumable."""
    for draft in drafts:
        if not Path(draft.planned.folder).is_absolute():
            continue
        if draft.planned.fault and not skip_invalid:
            raise UserError(draft.planned.fault)
        if draft.job is not None:
            with RunDir(Path(draft.planned.folder)).locked():
                pass


def calibrations(jobs: Iterable[Job]) -> dict[str, Job]:
    """Return a job that measures all_reduce for each way to start ranks; sweep.calibrate=true."""
    jobs_by_id = dict[str, Job]()
    for job in jobs:
        config = job.config
        if config.task != "train" or config.world_size == 1:
            continue
        start = [config.world_size, asdict(config.backend), asdict(config.launch)]
        chosen = (f"world_size={config.world_size}", f"backend={config.backend.name}")
        name = ",".join(["calibration", *chosen])
        calibration = replace(
            job,
            config=replace(config, task="collectives", resume=None, collectives=ALL_REDUCE),
            overrides=("task=collectives", *chosen),
            number=0,
            title=name,
        )
        jobs_by_id.setdefault(f"{digest(start)} {name}", calibration)
    return jobs_by_id
