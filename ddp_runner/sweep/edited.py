"""Jobs of a sweep whose YAML was edited since: the same command makes others now. Torch-free."""

from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path

from ddp_runner.errors import listed
from ddp_runner.job import Job
from ddp_runner.sweep.plan_file import Plan, PlannedJob, change_plan, is_left, read_plan, without
from ddp_runner.sweep.slurm.queue import submitted_as
from ddp_runner.tracking.claim import changed_keys
from ddp_runner.tracking.run_dir import RunDir


def leave_out(folder: Path, wanted: Container[str]) -> dict[str, PlannedJob]:
    """Take jobs out of a plan that the command no longer makes and that nobody runs.

    They would be left for ever: each start of the sweep plans the others.

    Args:
        folder: of the sweep.
        wanted: the ids of the jobs that the command makes.

    Returns:
        The jobs of the plan that the command no longer makes, by name; also those that stay in it,
        since they have ended or somebody runs them.

    Raises:
        UserError: the plan is damaged, or cannot be written.
    """
    known = read_plan(folder).jobs
    gone = {job_id: one for job_id, one in known.items() if job_id not in wanted}
    left = {
        job_id
        for job_id, one in gone.items()
        if is_left(one.standing(folder)) and submitted_as(folder / one.folder) is None
    }
    if left:
        change_plan(folder, partial(without, left))
    names = {one.name for job_id, one in known.items() if job_id in wanted}
    return {one.name: one for one in gone.values() if one.name not in names}


def replaced(
    folder: Path, gone: Mapping[str, PlannedJob], plan: Plan, jobs: Mapping[str, Job]
) -> Iterator[str]:
    """Yield what to say of the jobs that the command no longer makes.

    Args:
        folder: of the sweep.
        gone: those jobs, by name.
        plan: of the sweep now.
        jobs: what the command makes, by id.

    Raises:
        UserError: the frozen config of a job that was made before is damaged.
    """
    new = {plan.jobs[job_id].name: job_id for job_id in jobs}
    if both := [name for name in new if name in gone]:
        old = RunDir(folder / gone[both[0]].folder)
        keys = changed_keys(jobs[new[both[0]]].config, old) if old.is_frozen else []
        folders = [(plan.jobs[new[name]].folder, gone[name].folder) for name in both]
        shown = [now if now == before else f"{now} for {before}" for now, before in folders]
        yield (
            f"changed since this sweep began: {listed(keys) or 'what the environment gives'}; "
            f"new jobs replace the earlier ones: {listed(shown)}"
        )
    if others := [one.folder for name, one in gone.items() if name not in new]:
        yield f"no longer made by the sweep's command: {listed(others)}"
