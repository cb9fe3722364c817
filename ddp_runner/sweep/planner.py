"""Plans the jobs of a batch, each with its folder, or with why it is invalid. Torch-free.

Most jobs are new runs, in the sweep's folder. A job that resumes a run stays in that run's own.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.identity import config_hash, digest
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import Config
from ddp_runner.config.sections import SweepConfig
from ddp_runner.errors import UserError
from ddp_runner.job import Job, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.calibration import calibrations
from ddp_runner.sweep.jobs import JobBatch, SweepJob, freeze_unheld, num_sessions
from ddp_runner.sweep.layout import JobHardware
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.plan_file import Plan, PlannedJob, change_plan, extended, read_plan
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.sweep_dir import changes, kept, sweep_command
from ddp_runner.tracking.alive import standing
from ddp_runner.tracking.outputs import job_name
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import last_session_start, read_run_record
from ddp_runner.tracking.start_block import fact_lines, shown_path

NOTE_EVERY = 1000  # jobs, which take some seconds to plan


@dataclass(frozen=True)
class SweepCommand:
    """What the command line gives, and what makes a job of it."""

    words: Sequence[str]  # as the user wrote them
    overrides: Sequence[str]  # those with several values among them
    read: Callable[[Sequence[str]], Sequence[Override]]  # parses them
    common: DictConfig  # what all jobs have in common, with the ``hydra`` node
    compose: Callable[[Sequence[str], int], DictConfig]  # from a job's words, and its number from 0
    name_of: Callable[[DictConfig], str]  # of its folder; of a run that it resumes, the path
    plan: Callable[[DictConfig, Callable[[Config], JobHardware]], Job]


@dataclass(frozen=True)
class Draft:
    """A job as it was planned; without one if it is invalid."""

    planned: PlannedJob
    job: Job | None = None


@dataclass
class Planner:
    """Plans the batches of one sweep."""

    command: SweepCommand
    folder: Path
    where: Local | Slurm
    is_search: bool
    earlier: Path | None = None  # the folder of a sweep of the same command that has ended
    settings: SweepConfig = field(default_factory=SweepConfig)  # those of the last job
    queued: set[str] = field(default_factory=set)  # the ids of all valid jobs
    _has_begun: bool = False  # a job of it has a config
    _accepted: dict[str, SweepConfig] = field(default_factory=dict)
    _validated: DictConfig | None = None
    _resumed: set[Path] = field(default_factory=set)

    def draft(self, batch: Iterable[Sequence[str]], numbers: Iterable[int]) -> list[Draft]:
        """Return the jobs of a batch; composed configs are large and are not kept.

        Args:
            batch: the words of each job.
            numbers: of the jobs or trials, counted from 0.

        Raises:
            UserError: the sweep as a whole is invalid: no job of it has a config, or several would
                resume one run.
        """
        drafts, fault = list[Draft](), None
        for words, number in zip(batch, numbers, strict=False):
            try:
                composed = self.command.compose(words, number)
            except UserError as error:
                varied = [one for one in words if one not in self.command.overrides]
                drafts.append(self._invalid(words, job_name(varied), error))
                fault = fault or error
                continue
            if not self._has_begun:  # a mistake in the command prints nothing but itself
                self._has_begun = True
                facts = {"sweep": str(shown_path(self.folder))}
                if self.earlier is not None:
                    facts["earlier"] = f"{shown_path(self.earlier)} of the same command has ended"
                print(fact_lines(facts), flush=True)
            self.validate(composed)
            drafts.append(self._draft(composed, words, number))
            if len(drafts) % NOTE_EVERY == 0:
                print(f"{len(drafts)} jobs are planned", flush=True)
        if fault is not None and not self._has_begun:
            raise fault
        return drafts

    def _invalid(self, words: Sequence[str], name: str, error: UserError) -> Draft:
        job_id = f"invalid: {digest(list(words))} {name}"
        return Draft(PlannedJob(job_id, name, str(error), self.settings.skip_invalid))

    def validate(self, composed: DictConfig) -> None:
        """Reject rules of the sweep that its jobs cannot be run with, where they are to run.

        Raises:
            UserError: a rule is broken.
        """
        if composed is self._validated:  # with other values of plain keys
            return
        self._validated, names = composed, ["sweep", "launch", "backend"]
        parts = [OmegaConf.to_container(composed[name]) for name in names]
        key = json.dumps(parts, default=str)
        if key not in self._accepted:  # of most sweeps these parts are the same in all jobs
            config = to_config(OmegaConf.masked_copy(composed, names))
            self.where.validate(config, searches=self.is_search)
            self._accepted[key] = config.sweep
        self.settings = self._accepted[key]

    def _draft(self, composed: DictConfig, words: Sequence[str], number: int) -> Draft:
        name = self.command.name_of(composed)
        resumes = None
        if Path(name).is_absolute():
            self._validate_alone(Path(name))
            resumes = last_session_start(read_run_record(Path(name), missing_ok=True))
        try:
            job = self.command.plan(composed, self.where.hardware_of)
        except UserError as error:
            return self._invalid(words, name, error)
        job = replace(job, run_dir=self.folder / name, number=number + 1)
        # A run's config changes as it is resumed, so its job is known by what the command says. The
        # name counts as well: two jobs may differ only in how their ranks start.
        identity = (
            config_hash(job.config) if resumes is None else digest(sweep_command(job.overrides))
        )
        folder = name if resumes is not None else self._free(name, identity)
        return Draft(PlannedJob(f"{identity} {name}", folder, resumes=resumes), job)

    def _free(self, name: str, identity: str) -> str:
        """Return a folder that holds no run of another config: the plan may have been deleted."""
        for number in count(1):
            free = name if number == 1 else f"{name}-{number}"
            record = standing(RunDir(self.folder / free)).record
            if record.get("config_hash", identity) == identity:
                return free
        raise AssertionError

    def _validate_alone(self, run: Path) -> None:
        if self.is_search or run.resolve() in self._resumed:
            shown = RunDir(shown_path(run)).resume_argument
            raise UserError(
                f"{shown} continues one run, in its own folder, and several jobs of this sweep "
                f"would; to start each from its weights, choose the run's groups and write "
                f"++model.weights={shown_path(run)} in place of resume"
            )
        self._resumed.add(run.resolve())

    def queue(self, drafts: Sequence[Draft], *, num_failed: int) -> JobBatch:
        """Write the jobs into the plan, freeze the new ones in their folders, and return them.

        Raises:
            UserError: the plan or a folder cannot be written.
        """
        jobs = self.jobs(drafts)
        before = read_plan(self.folder)
        plan = change_plan(self.folder, partial(self.planned, drafts))
        self.tell_changes(before, plan, jobs)
        self.queued |= jobs.keys()
        for one in drafts:
            if one.job is None and not one.planned.is_skipped:
                print_error(f"{shown_path(Path(one.planned.folder))}: {one.planned.fault}")
        total = f" of {max((job.number for job in jobs.values()), default=0)}"
        queued = dict[str, SweepJob]()
        for job_id, job in jobs.items():
            planned = plan.jobs[job_id]
            place = f"job {job.number}{total}" if job.number else "calibration"
            if self.is_search and job.number:  # as Optuna's tools call it
                place = f"trial {job.number - 1}"
            title = f"{place}: {shown_path(Path(planned.folder))}"
            run_dir = self.folder / planned.folder
            run_dir.mkdir(exist_ok=True)
            named = replace(job, run_dir=run_dir, title=title)
            found = planned.standing(self.folder)
            if self.is_search and job.number and found.status == Status.COMPLETED:
                print(f"\n{title} was run before: its result is taken", flush=True)
            if found.status == Status.QUEUED and planned.resumes is None:  # a run has its config
                freeze_unheld(named)
            sessions = num_sessions(found) if found.status == Status.FAILED else 0
            queued[job_id] = SweepJob(planned, named, self.folder, sessions)
        return JobBatch(queued, self.settings, num_failed)

    def planned(self, drafts: Sequence[Draft], plan: Plan) -> Plan:
        """Return the plan with the jobs of a batch, without those that the command left out."""
        wanted = {one.planned.job_id: one.planned for one in drafts}
        jobs = {job_id: PlannedJob(job_id, one.title) for job_id, one in self.jobs(drafts).items()}
        wanted = jobs | wanted
        left = plan if self.is_search else kept(self.folder, wanted, plan)
        return extended(wanted.values(), left)

    def tell_changes(self, before: Plan, plan: Plan, jobs: Mapping[str, Job]) -> None:
        """Print which jobs an edited YAML has replaced, or left out."""
        for line in () if self.is_search else changes(self.folder, before, plan, jobs):
            print(line, flush=True)

    def jobs(self, drafts: Iterable[Draft]) -> dict[str, Job]:
        """Return the valid jobs by their id, calibrations first."""
        found = dict[str, Job]()
        for one in drafts:
            if one.job is not None:
                name = str(shown_path(Path(one.planned.folder)))
                found.setdefault(one.planned.job_id, replace(one.job, title=name))
        if self.settings.calibrate:
            return calibrations(found.values(), folder=self.folder) | found
        return found


def validate_resumed(drafts: Iterable[Draft], *, skip_invalid: bool) -> None:
    """Reject a batch if one of its runs cannot be resumed, before another one is.

    Raises:
        UserError: a run does not exist, is in use, or cannot be resumed as asked.
    """
    for one in drafts:
        if not Path(one.planned.folder).is_absolute():
            continue
        if one.planned.fault and not skip_invalid:
            raise UserError(one.planned.fault)
        if one.job is not None:
            with RunDir(Path(one.planned.folder)).locked():
                continue
