"""Jobs of a sweep whose YAML was edited since: the same command makes others now. Torch-free."""

from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ddp_runner.errors import UserError, listed
from ddp_runner.job import Job
from ddp_runner.sweep.plan_file import Plan, is_left, without
from ddp_runner.sweep.slurm.queue import submitted_as
from ddp_runner.tracking.claim import changed_keys
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import shown_path


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
