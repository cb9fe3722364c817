"""A sweep's folder: named, found again or new; and jobs whose YAML was edited since. Torch-free."""

import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError, listed
from ddp_runner.job import Job, Status
from ddp_runner.sweep.plan_file import PLAN, TO_RUN, Plan, is_left, read_plan, without
from ddp_runner.sweep.slurm.queue import submitted_as
from ddp_runner.tracking.outputs import claim, sweep_folder
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_folder_claim import changed_keys
from ddp_runner.tracking.start_block import shown_path

UNNAMED = AUTO  # hydra.sweep.dir, unless the user names a folder


@contextmanager
def sweep_dir(composed: DictConfig, words: Sequence[str]) -> Iterator[tuple[Path, Path | None]]:
    """Give the sweep's folder, and that of a sweep of the same command that has ended, if any.

    The first is the one that the user asked for, else that of an unfinished sweep of the same
    command, else a new one, which is removed if no job of it was even queued. A dry run makes none.
    `composed` is what all jobs have in common, with the ``hydra`` node.

    Raises:
        UserError: the user asks for a folder without a name, or that cannot be written.
    """
    asked = composed.hydra.sweep.dir
    if not asked:
        raise UserError("hydra.sweep.dir is empty; write hydra.sweep.dir=FOLDER, or leave it out")
    folder, earlier = Path(asked) if asked != UNNAMED else None, None
    new = sweep_folder(composed.name)
    if folder is None:
        retries, command = composed.sweep.retry is not None, sweep_command(words)
        folder = unfinished_sweep(new.parent, command=command, retry_failed=retries)
        if folder is None:
            earlier, _ = next(_sweeps_of(command, new.parent), (None, None))
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
                with suppress(OSError):
                    folder.parent.rmdir()  # outputs, if it is empty


def unfinished_sweep(parent: Path, *, command: Sequence[str], retry_failed: bool) -> Path | None:
    """Return the newest sweep in `parent` that the same command began and that has work left."""
    wanted = {*TO_RUN, *([Status.FAILED] if retry_failed else [])}
    for folder, plan in _sweeps_of(command, parent):
        states = (one.standing(folder) for one in plan.jobs.values())
        if plan.is_open or any(one.is_alive or one.status in wanted for one in states):
            return folder
    return None


def _sweeps_of(command: Sequence[str], parent: Path) -> Iterator[tuple[Path, Plan]]:
    """Yield the sweeps in `parent` that a command began, the newest first, with their plans."""
    plans = [path for path in parent.glob(f"*/{PLAN}") if path.stat().st_uid == os.geteuid()]
    for path in sorted(plans, key=lambda one: one.stat().st_mtime, reverse=True):
        with suppress(UserError):  # damaged, or of another version
            plan = read_plan(path.parent)
            if list(plan.command) == list(command):
                yield path.parent, plan


def sweep_command(arguments: Sequence[str]) -> list[str]:
    """Return what identifies a sweep: its command line, without how and where its jobs run."""
    others = ("sweep.", "verbose=", "hydra/launcher=", "hydra.launcher.", "--multirun")
    own = "sweep.objective="  # of a search: another one makes another study

    def counts(word: str) -> bool:
        key = word.lstrip("+~")
        return key.startswith(own) or not (key == "-m" or key.startswith(others))

    return [*filter(counts, arguments)]


def kept(folder: Path, wanted: Container[str], plan: Plan) -> Plan:
    """Return the plan without the jobs that the command no longer makes and that nobody runs.

    Otherwise the sweep would never end, since no start of it would run them. `wanted` are the ids
    of the jobs that the command makes.
    """
    left = {
        job_id
        for job_id, one in plan.jobs.items()
        if job_id not in wanted
        and is_left(one.standing(folder))
        and submitted_as(folder / one.folder) is None
    }
    return without(left, plan)


def changes(folder: Path, before: Plan, plan: Plan, jobs: Mapping[str, Job]) -> Iterator[str]:
    """Yield the lines about jobs that the command no longer makes.

    Args:
        folder: of the sweep.
        before: its plan as the command began.
        plan: its plan with the jobs that the command makes.
        jobs: those jobs, by id.
    """
    new = {plan.jobs[job_id].name: job_id for job_id in jobs}
    same = {one.name for job_id, one in before.jobs.items() if job_id in jobs}
    gone = {
        one.name: one
        for job_id, one in before.jobs.items()
        if job_id not in jobs and one.name not in same and one.fault is None
    }
    if both := [name for name in new if name in gone]:
        keys, old = list[str](), RunDir(folder / gone[both[0]].folder)
        with suppress(UserError):  # it is damaged
            keys = changed_keys(jobs[new[both[0]]].config, old) if old.is_frozen else []
        folders = [(plan.jobs[new[name]].folder, gone[name].folder) for name in both]
        shown = [now if now == then else f"{now} in place of {then}" for now, then in folders]
        yield (
            f"changed since this sweep began: {listed(keys) or 'what makes its jobs'}; "
            f"so these are new jobs: {listed(shown, separator='; ')}"
        )
    if others := [one.folder for name, one in gone.items() if name not in new]:
        yield f"no longer made by the sweep's command: {listed(others, separator='; ')}"
    staying = {one.folder for one in plan.jobs.values()}
    left = [RunDir(folder / one.folder) for one in gone.values() if one.folder not in staying]
    if left := [one for one in left if one.record.exists()]:
        argument = RunDir(shown_path(left[0].path)).resume_argument
        names = listed([one.path.name for one in left], separator="; ")
        yield f"stopped earlier and left out: {names}; a run alone goes on with {argument}"
