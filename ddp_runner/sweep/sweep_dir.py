"""The folder of a sweep, and its plan, sweep.json: the command and its jobs. Torch-free.

The status of a job is not here but in the job's folder; see ``tracking.alive``. Only the fault of a
job that cannot begin is here.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError, any_error, os_errors
from ddp_runner.files import locked, read_file, replace_file
from ddp_runner.job import Status
from ddp_runner.sweep.slurm.queue import submitted_as
from ddp_runner.tracking.alive import LOST, Standing, standing
from ddp_runner.tracking.outputs import claim, sweep_folder
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import last_session_start

if TYPE_CHECKING:  # the status command starts without it
    from omegaconf import DictConfig

PLAN = "sweep.json"
FORMAT_VERSION = 2
TO_RUN = (Status.QUEUED, Status.PREEMPTED, LOST)  # a start of the sweep runs jobs with these


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep."""

    job_id: str  # hash of the resolved config, a space, and the job's name
    folder: str  # name inside the sweep's folder, or the path of a run to resume
    fault: str | None = None  # why the job is invalid, or could not begin
    is_skipped: bool = False  # by sweep.skip_invalid
    resumes: float | None = None  # start time of the last session of the run to resume

    @property
    def name(self) -> str:
        """The name that its config gives it; jobs with the same name have different folders."""
        return self.job_id.removeprefix("invalid: ").partition(" ")[2]

    def standing(self, sweep: Path, *, server_time: Callable[[], float] = time.time) -> Standing:
        """Return how the job stands now; a run to resume is queued until the job has begun."""
        current = standing(RunDir(sweep / self.folder), server_time=server_time)
        if self.fault is not None:
            status = Status.SKIPPED if self.is_skipped else Status.FAILED
            return Standing(status, current.record, fault=self.fault)
        if self.resumes is not None and last_session_start(current.record) == self.resumes:
            has_ended = current.seen_s is None or current.status == LOST
            return replace(current, status=Status.QUEUED, record={}) if has_ended else current
        return current


@dataclass(frozen=True)
class Plan:
    """The command of a sweep, and its jobs by id in the order of planning."""

    command: Sequence[str] = ()
    jobs: Mapping[str, PlannedJob] = field(default_factory=dict)
    is_open: bool = False  # more jobs may follow: a search runs, or was killed


def read_plan(folder: Path) -> Plan:
    """Return the plan in a folder, empty if it is missing; raise a UserError if it is damaged."""
    path, fix = folder / PLAN, "delete it: the runs stay in their folders"
    with any_error(f"{path} is damaged or of another version", fix):
        if not path.exists():
            return Plan()
        fields = json.loads(read_file(path))
        if fields["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {fields['format_version']}")
        jobs = [_checked_job(job) for job in fields["jobs"]]
        command = fields["command"]
        if not (isinstance(command, list) and all(isinstance(word, str) for word in command)):
            raise ValueError("a command that is not a list of texts")
        return Plan(command, {job.job_id: job for job in jobs}, fields["is_open"] is True)


def plan_or_fault(folder: Path) -> tuple[Plan, str | None]:
    """Return the plan of the sweep in a folder, and why it cannot be read: then it is empty."""
    try:
        return read_plan(folder), None
    except UserError as error:  # one damaged sweep must not hide the others
        return Plan(), str(error)


def change_plan(folder: Path, change: Callable[[Plan], Plan]) -> Plan:
    """Replace the plan by the result of `change`, one launcher at a time, and return it."""
    path = folder / PLAN
    with os_errors(f"{path} cannot be written"), locked(folder / ".sweep.lock"):
        plan = change(read_plan(folder))
        fields = {
            "format_version": FORMAT_VERSION,
            "command": list(plan.command),
            "is_open": plan.is_open,
            "jobs": [asdict(job) for job in plan.jobs.values()],
        }
        replace_file(path, json.dumps(fields, indent=1, ensure_ascii=False))
    return plan


def restarted(words: Sequence[str], plan: Plan) -> Plan:
    """Return the plan at a start of the sweep, without faults: the rules are checked again."""
    valid = {job_id: job for job_id, job in plan.jobs.items() if job.fault is None}
    return Plan(sweep_command(words), valid, is_open=True)


def with_jobs(jobs: Iterable[PlannedJob], plan: Plan) -> Plan:
    """Return the plan with more jobs, each in a folder that no other job of the plan has."""
    planned, folders = dict(plan.jobs), {job.folder for job in plan.jobs.values()}
    numbers = dict[str, int]()  # last number tried for each name: thousands may want the same name
    for job in jobs:
        if job.job_id in planned:
            continue
        folder = job.folder
        while folder in folders and not Path(folder).is_absolute():
            numbers[job.folder] = numbers.get(job.folder, 1) + 1
            folder = f"{job.folder}-{numbers[job.folder]}"
        folders.add(folder)
        planned[job.job_id] = replace(job, folder=folder)
    return replace(plan, jobs=planned)


def with_fault(job_id: str, fault: str, plan: Plan) -> Plan:
    """Return the plan with the reason why a job could not begin."""
    if job_id not in plan.jobs:  # another launcher has restarted the sweep
        return plan
    return replace(plan, jobs={**plan.jobs, job_id: replace(plan.jobs[job_id], fault=fault)})


def _checked_job(fields: Any) -> PlannedJob:
    """Return a job whose folder is a plain name, or the run that its command names."""
    job = PlannedJob(**fields)
    name, texts = job.folder, [job.job_id, job.folder, "" if job.fault is None else job.fault]
    if not all(isinstance(text, str) for text in texts) or not isinstance(job.is_skipped, bool):
        raise ValueError("a job with a field of another type")
    json.dumps(fields, ensure_ascii=False).encode()  # raises if it cannot be written again
    is_run = Path(name).is_absolute() and job.job_id.endswith(f" {name}")
    if "\0" in name or not (is_run or (Path(name).name == name and name not in ("", ".."))):
        raise ValueError(f"a job with the folder {name[:40]}")
    return job


@contextmanager
def sweep_dir(composed: "DictConfig", words: Sequence[str]) -> Iterator[tuple[Path, Path | None]]:
    """Yield the sweep's folder, and for a new sweep the last ended sweep of the same command.

    Use the folder that the user names, else that of an unfinished sweep of the same command, else a
    new folder. Remove a new folder at the end if no job was queued. A dry run creates no folder.

    Raises:
        UserError: hydra.sweep.dir is empty, or cannot be written.
    """
    named = composed.hydra.sweep.dir
    if not named:
        raise UserError("hydra.sweep.dir is empty", "write hydra.sweep.dir=FOLDER, or leave it out")
    folder, earlier = None if named == AUTO else Path(named), None
    new = sweep_folder(composed.name)
    if folder is None:
        retries, command = composed.sweep.retry is not None, sweep_command(words)
        folder = unfinished_sweep(new.parent, command=command, retry_failed=retries)
        if folder is None:
            earlier, _ = next(_sweeps_of_command(command, new.parent), (None, None))
    if composed.sweep.dry_run:
        yield folder or new, earlier
    elif folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        RunDir(folder).ensure_writable()
        yield folder, None
    else:
        folder = claim(new)
        try:
            yield folder, earlier
        finally:
            if not (folder / PLAN).exists():
                shutil.rmtree(folder, ignore_errors=True)
                if not any(folder.parent.iterdir()):
                    folder.parent.rmdir()


def unfinished_sweep(parent: Path, *, command: Sequence[str], retry_failed: bool) -> Path | None:
    """Return the newest sweep of the command in `parent` that has jobs to run or running."""
    wanted = {*TO_RUN, *([Status.FAILED] if retry_failed else [])}
    for folder, plan in _sweeps_of_command(command, parent):
        standings = (job.standing(folder) for job in plan.jobs.values())
        if plan.is_open or any(job.is_alive or job.status in wanted for job in standings):
            return folder
    return None


def _sweeps_of_command(command: Sequence[str], parent: Path) -> Iterator[tuple[Path, Plan]]:
    """Yield the folders and plans of this user's sweeps of a command, the newest first."""
    paths = [path for path in parent.glob(f"*/{PLAN}") if path.stat().st_uid == os.geteuid()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        plan, fault = plan_or_fault(path.parent)
        if fault is None and list(plan.command) == list(command):
            yield path.parent, plan


def sweep_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that identify a sweep, without those that say how its jobs run."""
    ignored = ("sweep.", "verbose=", "hydra/launcher=", "hydra.launcher.", "--multirun")
    objective = "sweep.objective="  # another objective makes another study

    def identifies(word: str) -> bool:
        key = word.lstrip("+~")
        return key.startswith(objective) or not (key == "-m" or key.startswith(ignored))

    return [*filter(identifies, arguments)]


def without_stale_jobs(folder: Path, wanted: Container[str], plan: Plan) -> Plan:
    """Return the plan without waiting jobs outside of `wanted`: with them it would never end."""
    kept = {
        job_id: job
        for job_id, job in plan.jobs.items()
        if job_id in wanted
        or job.standing(folder).status not in TO_RUN
        or submitted_as(folder / job.folder) is not None
    }
    return replace(plan, jobs=kept)
