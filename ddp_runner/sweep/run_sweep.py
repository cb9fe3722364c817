"""A command with -m: its folder, its batches of jobs, its table and its exit code. Torch-free.

A grid is one batch. A search sends one batch after another, and chooses each by the results of the
last. All jobs of a batch are composed, resolved and frozen before the first of them starts.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.config.rules import known_steps
from ddp_runner.errors import UserError, counted, printable
from ddp_runner.host.streams import line_width, wrapped
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.grid import Grid
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.plan_file import PLAN, begun, change_plan, read_plan
from ddp_runner.sweep.planner import Draft, Planner, SweepCommand, validate_resumed
from ddp_runner.sweep.search import Search
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.slurm.slurm_settings import slurm_settings
from ddp_runner.sweep.sweep_dir import sweep_command, sweep_dir
from ddp_runner.sweep.sweep_table import (
    aligned,
    failed_jobs,
    objective_of,
    print_report,
    sweep_table,
)
from ddp_runner.tracking.start_block import shown_path

DRY_COLUMNS = ("job", "nodes", "ranks", "computes on", "steps")  # of sweep.dry_run=true

NONE_LEFT = "no trial is left of the search; a larger hydra.sweeper.n_trials adds some"


def run_sweep(command: SweepCommand) -> int:
    """Run the sweep, and print its table, and its report if sweep.report is set.

    Returns:
        The exit code of the worst job; a sweep whose jobs are all skipped is invalid.

    Raises:
        UserError: the sweep is invalid, or the search has no best job.
    """
    common, node = command.common, command.common.hydra
    is_search = _is_search(common)
    params = [f"{key}={value}" for key, value in node.sweeper.params.items()]
    overrides = command.read([*params, *command.overrides])  # the command's own win
    settings = slurm_settings(node.launcher)
    with sweep_dir(common, command.words) as (folder, earlier):
        where = Local() if settings is None else Slurm(folder, settings)
        planner = Planner(command, folder, where, is_search=is_search, earlier=earlier)
        planner.validate(common)
        chooser: Grid | Search
        if is_search:
            chooser = Search(
                node.sweeper,
                overrides,
                folder=folder,
                objective=common.sweep.objective,
                is_dry=common.sweep.dry_run,
                batch_size=common.sweep.parallel_jobs,
                retries=common.sweep.retry is not None,
            )
        else:
            chooser = Grid(overrides)
        if common.sweep.dry_run:
            return _print_jobs(planner, planner.draft(chooser.ask(), chooser.numbers))
        try:
            outcomes, best = _run_batches(planner, chooser)
        finally:
            where.close()
            if (folder / PLAN).exists():
                print(sweep_table(folder, width=line_width(sys.stdout)), flush=True)
        if best is not None:
            print(wrapped(printable(best), line_width(sys.stdout)), flush=True)
        failed = failed_jobs(folder, among=planner.queued)
        if any(one.status == Status.PREEMPTED for one in outcomes):
            print("the same command goes on with this sweep", flush=True)
        elif failed and common.sweep.retry is None:
            jobs = counted(len(failed), "failed job")
            print(f"the same command with sweep.retry=failed runs {jobs} again", flush=True)
        if is_search:  # also those of an earlier start
            outcomes += failed_jobs(folder)
        worst = max((one.exit_code for one in outcomes), default=None)
        if worst is None and where.starts_jobs and not is_search:
            worst = EXIT_USER_ERROR
            print_error(
                "every job of the sweep is invalid and was skipped; see the sentences above"
            )
        if planner.settings.report:
            print_report(folder)
    return worst or EXIT_COMPLETED


def _run_batches(planner: Planner, chooser: Grid | Search) -> tuple[list[Outcome], str | None]:
    """Run batch after batch.

    Returns:
        How each job ended, and the signal that stopped the sweep; and what to say of the best job.
    """
    folder, num_failed, outcomes, is_first = planner.folder, 0, list[Outcome](), True
    while words := chooser.ask():
        drafts = planner.draft(words, chooser.numbers)
        validate_resumed(drafts, skip_invalid=planner.settings.skip_invalid)
        faults = {None if one.planned.is_skipped else one.planned.fault for one in drafts}
        if not planner.is_search and len(faults) == 1 and (fault := faults.pop()) is not None:
            raise UserError(fault)  # one mistake in the command, said once
        if is_first:
            is_first = False
            change_plan(folder, partial(begun, sweep_command(planner.command.words)))
        for one in drafts:
            if one.planned.fault and not one.planned.is_skipped:
                outcomes.append(Outcome.invalid(folder / one.planned.folder, one.planned.fault))
                num_failed += 1
        batch = planner.queue(drafts, num_failed=num_failed)
        found = planner.where.run(batch) if batch.jobs and not batch.is_over(0) else {}
        outcomes += found.values()
        num_failed += (failed := batch.failures(found))
        chooser.tell(_results(planner, drafts))
        if any(one.status == Status.PREEMPTED for one in found.values()):
            return outcomes, None
        if batch.is_over(failed) and planner.is_search:
            return outcomes, None
    if is_first:
        print(NONE_LEFT, flush=True)
    change_plan(folder, lambda plan: replace(plan, is_open=False))
    return outcomes, chooser.finish()


def _results(planner: Planner, drafts: Sequence[Draft]) -> list[float | str | None]:
    """Return the objective of each job; why it has none, as text; None: it has not ended."""
    name, folder = planner.settings.objective, planner.folder
    if name is None:
        return [None] * len(drafts)
    plan = read_plan(folder)
    known = [plan.jobs.get(one.planned.job_id, one.planned) for one in drafts]
    return [
        one.fault or objective_of(folder / one.folder, one.standing(folder), name=name)
        for one in known
    ]


def _print_jobs(planner: Planner, drafts: Sequence[Draft]) -> int:
    """Print a line for each job, then why the invalid ones are, then how many there are.

    Returns:
        The exit code: whether a job is invalid, and not skipped.
    """
    folder, width = planner.folder, line_width(sys.stdout)
    before, jobs = read_plan(folder), planner.jobs(drafts)
    planner.tell_changes(before, planner.planned(drafts, before), jobs)
    rows, known = [DRY_COLUMNS], before.jobs
    for job_id, job in jobs.items():
        layout, config = planner.where.layout(job.config), job.config
        is_done = job_id in known and known[job_id].standing(folder).status == Status.COMPLETED
        device = f"{config.backend.device}, {config.backend.name}"
        # A dash where only the run itself will know them.
        steps = (config.task == "train" and known_steps(config)) or "-"
        note = f"{steps}  {Status.COMPLETED} already" if is_done else str(steps)
        rows.append((job.title, str(layout.num_nodes), str(layout.num_ranks), device, note))
    invalid = [one.planned for one in drafts if one.job is None]
    names = [str(shown_path(Path(one.folder))) for one in invalid]
    for name, one in zip(names, invalid, strict=True):
        rows.append((name, "-", "-", "-", "skipped" if one.is_skipped else "invalid"))
    print("", *aligned(rows, width=width), sep="\n")
    for name, one in zip(names, invalid, strict=True):
        print(wrapped(printable(f"{name}: {one.fault}"), width))
    counts = [counted(len(jobs), "valid job"), counted(len(invalid), "invalid job")]
    print(f"{', '.join(counts)}; nothing was started (sweep.dry_run=true)")
    if planner.is_search and not jobs:
        print(NONE_LEFT)
    elif planner.is_search:
        print("a search chooses its later trials by the results of these")
    return EXIT_COMPLETED if all(one.is_skipped for one in invalid) else EXIT_USER_ERROR


def _is_search(common: DictConfig) -> bool:
    """Return whether Optuna chooses the jobs.

    Raises:
        UserError: neither it nor a grid does, or it has no objective.
    """
    target = str(common.hydra.sweeper.get("_target_"))
    if target == f"{Grid.__module__}.{Grid.__name__}":
        return False
    if target != f"{Search.__module__}.{Search.__name__}":
        raise UserError(
            f"hydra/sweeper: {target} is of another package; write hydra/sweeper=optuna for a "
            "search, or leave hydra/sweeper out"
        )
    if common.sweep.objective is None:
        raise UserError(
            "sweep.objective is null and this hydra/sweeper looks for the best of a metric; "
            "write sweep.objective=eval/accuracy"
        )
    return True
