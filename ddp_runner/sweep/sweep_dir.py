"""The folder of a sweep, and the jobs that its command no longer makes. Torch-free."""

import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError, listed
from ddp_runner.job import Job, Status
from ddp_runner.sweep.plan_file import PLAN, TO_RUN, Plan, plan_or_fault
from ddp_runner.sweep.slurm.queue import submitted_as
from ddp_runner.tracking.outputs import claim, sweep_folder
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_folder_claim import changed_values


@contextmanager
def sweep_dir(composed: DictConfig, words: Sequence[str]) -> Iterator[tuple[Path, Path | None]]:
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
    """Return the words that identify a sweep: without how and where its jobs run."""
    ignored = ("sweep.", "verbose=", "hydra/launcher=", "hydra.launcher.", "--multirun")
    objective = "sweep.objective="  # another objective makes another study

    def identifies(word: str) -> bool:
        key = word.lstrip("+~")
        return key.startswith(objective) or not (key == "-m" or key.startswith(ignored))

    return [*filter(identifies, arguments)]


def without_stale_jobs(folder: Path, wanted: Container[str], plan: Plan) -> Plan:
    """Return the plan without waiting jobs that are not in `wanted`: the sweep would never end."""
    kept = {
        job_id: job
        for job_id, job in plan.jobs.items()
        if job_id in wanted
        or job.standing(folder).status not in TO_RUN
        or submitted_as(folder / job.folder) is not None
    }
    return replace(plan, jobs=kept)


def change_lines(folder: Path, before: Plan, plan: Plan, jobs: Mapping[str, Job]) -> Iterator[str]:
    """Yield lines about jobs of the plan `before` that the command no longer makes."""
    new = {plan.jobs[job_id].name: job_id for job_id in jobs}
    same = {job.name for job_id, job in before.jobs.items() if job_id in jobs}
    gone = {
        job.name: job
        for job_id, job in before.jobs.items()
        if job_id not in jobs and job.name not in same and job.fault is None
    }
    if changed := [name for name in new if name in gone]:
        old = RunDir(folder / gone[changed[0]].folder)
        config = jobs[new[changed[0]]].config
        keys = [*changed_values(config, old)] if old.is_frozen else []
        folders = [(plan.jobs[new[name]].folder, gone[name].folder) for name in changed]
        shown = [now if now == then else f"{now} in place of {then}" for now, then in folders]
        yield (
            f"changed since this sweep began: {listed(keys) or 'how its jobs are made'}; "
            f"so these are new jobs: {listed(shown, separator='; ')}"
        )
    if dropped := [job.folder for name, job in gone.items() if name not in new]:
        yield f"no longer made by the sweep's command: {listed(dropped, separator='; ')}"
