"""The plan of a sweep, in its sweep.json: the command, and the jobs that it makes. Torch-free.

How a job stands is not in it. That follows from the job's own folder, where the launcher or rank 0
writes it; see ``tracking.alive``. Only a job that cannot begin has no other place to say so.
"""

import json
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import locked, read_file, replace_file
from ddp_runner.job import Status
from ddp_runner.tracking.alive import LOST, Standing, standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import last_session_start

PLAN = "sweep.json"
FORMAT_VERSION = 2
TO_RUN = (Status.QUEUED, Status.PREEMPTED, LOST)  # what is left of a sweep; FAILED if it is asked


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep."""

    job_id: str  # the hash of its resolved config, and its name
    folder: str  # its name, inside the sweep's folder, or the path of a run that is resumed
    fault: str | None = None  # why it is invalid, or could not begin
    is_skipped: bool = False  # by sweep.skip_invalid
    resumes: float | None = None  # when the last session began of the run that it resumes

    @property
    def name(self) -> str:
        """Its name by its config; of two with one name, each has a folder of its own."""
        return self.job_id.removeprefix("invalid: ").partition(" ")[2]

    def standing(self, sweep: Path, *, server_time: Callable[[], float] = time.time) -> Standing:
        """Return how the job stands now; a run to resume is queued until the job has begun."""
        found = standing(RunDir(sweep / self.folder), server_time=server_time)
        if self.fault is not None:
            status = Status.SKIPPED if self.is_skipped else Status.FAILED
            return Standing(status, found.record, fault=self.fault)
        if self.resumes is not None and last_session_start(found.record) == self.resumes:
            ended = found.seen_s is None or found.status == LOST
            return replace(found, status=Status.QUEUED, record={}) if ended else found
        return found


@dataclass(frozen=True)
class Plan:
    """A sweep's command and its jobs by their id, in the order of planning."""

    command: Sequence[str] = ()
    jobs: Mapping[str, PlannedJob] = field(default_factory=dict)
    is_open: bool = False  # further jobs may follow: a search goes on, or was killed


def read_plan(folder: Path) -> Plan:
    """Return the plan of the sweep in a folder; an empty one if it has none.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    path = folder / PLAN
    try:
        fields = json.loads(read_file(path))
        if fields["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {fields['format_version']}")
        jobs = [_job(one) for one in fields["jobs"]]
        command = fields["command"]
        if not (isinstance(command, list) and all(isinstance(one, str) for one in command)):
            raise ValueError("a command that is not a list of texts")
        return Plan(command, {one.job_id: one for one in jobs}, fields["is_open"] is True)
    except FileNotFoundError:
        return Plan()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged or of another version ({error}); "
            "delete it: what its jobs left is in their folders"
        ) from error


def change_plan(folder: Path, change: Callable[[Plan], Plan]) -> Plan:
    """Replace the plan by what a function makes of it, one launcher at a time; return the new one.

    Raises:
        UserError: it is damaged, or cannot be written.
    """
    path = folder / PLAN
    with os_errors(f"{path} cannot be written"), locked(folder / ".sweep.lock"):
        plan = change(read_plan(folder))
        fields = {
            "format_version": FORMAT_VERSION,
            "command": list(plan.command),
            "is_open": plan.is_open,
            "jobs": [asdict(one) for one in plan.jobs.values()],
        }
        replace_file(path, json.dumps(fields, indent=1, ensure_ascii=False))
    return plan


def begun(command: Sequence[str], plan: Plan) -> Plan:
    """Return the plan of a sweep that begins, perhaps again: the rules are asked again."""
    valid = {job_id: one for job_id, one in plan.jobs.items() if one.fault is None}
    return Plan(command, valid, is_open=True)


def extended(wanted: Iterable[PlannedJob], plan: Plan) -> Plan:
    """Return the plan with further jobs, each in a folder that no other job has.

    A job that is there keeps its folder. A YAML that was edited meanwhile makes another job, which
    may want the folder of the old one.
    """
    jobs, taken = dict(plan.jobs), {one.folder for one in plan.jobs.values()}
    numbers = dict[str, int]()  # tried so far: thousands may want one name
    for one in wanted:
        if one.job_id in jobs:
            continue
        free = one.folder
        while free in taken and not Path(free).is_absolute():
            numbers[one.folder] = numbers.get(one.folder, 1) + 1
            free = f"{one.folder}-{numbers[one.folder]}"
        taken.add(free)
        jobs[one.job_id] = replace(one, folder=free)
    return replace(plan, jobs=jobs)


def without(job_ids: Container[str], plan: Plan) -> Plan:
    """Return the plan without these jobs."""
    jobs = {job_id: one for job_id, one in plan.jobs.items() if job_id not in job_ids}
    return replace(plan, jobs=jobs)


def is_left(found: Standing) -> bool:
    """Return whether a job is left to run, and nobody runs it."""
    return found.status in TO_RUN and not found.is_alive


def faulty(job_id: str, fault: str, plan: Plan) -> Plan:
    """Return the plan in which a job could not begin, for a reason that its folder lacks."""
    if job_id not in plan.jobs:  # another launcher has begun the sweep again
        return plan
    return replace(plan, jobs={**plan.jobs, job_id: replace(plan.jobs[job_id], fault=fault)})


def _job(fields: Any) -> PlannedJob:
    """Return a checked job: its folder is a plain name, or a run that its command names."""
    job = PlannedJob(**fields)
    name, texts = job.folder, [job.job_id, job.folder, "" if job.fault is None else job.fault]
    if not all(isinstance(one, str) for one in texts) or not isinstance(job.is_skipped, bool):
        raise ValueError("a job with a field of another kind")
    json.dumps(fields, ensure_ascii=False).encode()  # it must be possible to write it again
    is_run = Path(name).is_absolute() and job.job_id.endswith(f" {name}")  # as a command named it
    if "\0" in name or not (is_run or (Path(name).name == name and name not in ("", ".."))):
        raise ValueError(f"a job with the folder {name[:40]}")
    return job
