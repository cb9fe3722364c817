"""Runs a command with -m: its folder, batches, table and exit code. Torch-free.

All jobs of a batch are composed, resolved and frozen before the first of them starts. The first
jobs of a large new grid are a batch of their own: a thread plans the rest while they run.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.config.rules import known_steps
from ddp_runner.errors import UserError, counted, printable
from ddp_runner.host.processes import stop_signals_held
from ddp_runner.host.streams import line_width, wrap_lines
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.sweep.jobs import JobBatch, failed_outcome
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.planner import Draft, Planner, SweepCommand, validate_resumed
from ddp_runner.sweep.search import Grid, Search
from ddp_runner.sweep.slurm.executor import Slurm
from ddp_runner.sweep.slurm.slurm_settings import slurm_settings
from ddp_runner.sweep.sweep_dir import PLAN, change_plan, read_plan, restarted, sweep_dir
from ddp_runner.sweep.sweep_table import aligned, print_report, read_objective, sweep_table
from ddp_runner.tracking.start_block import shown_path

DRY_COLUMNS = ("job", "nodes", "ranks", "computes on", "steps")  # of sweep.dry_run=true
PLANNING_S = 3.0  # then the first jobs of a large grid start
NO_TRIALS = "the search has run all its trials; a larger hydra.sweeper.n_trials adds more"


def run_sweep(command: SweepCommand) -> int:
    """Run the sweep and print its table and report; return the exit code of the worst job.

    Raises:
        UserError: the sweep is invalid, or the search has no best job.
    """
    common = command.common
    is_search, settings = _is_search(common), slurm_settings(common.hydra.launcher)
    if is_search and settings is not None and not settings.submit:
        raise UserError(
            "hydra.launcher.submit=false leaves the jobs to you, and a search needs their results "
            "to choose the next jobs",
            "leave it out",
        )
    with sweep_dir(common, command.words) as (folder, earlier), ThreadPoolExecutor(1) as pool:
        executor = Local() if settings is None else Slurm(folder, settings)
        planner = Planner(command, folder, executor, is_search=is_search, earlier=earlier)
        planner.validate(common)
        chooser = _chooser(planner)
        if common.sweep.dry_run:
            return _print_jobs(planner, [*planner.draft(chooser.ask(), chooser.numbers)])
        try:
            outcomes, best = _run_batches(planner, chooser, pool)
        finally:
            planner.is_stopped = True
            executor.close()
            if (folder / PLAN).exists():
                print(sweep_table(folder, width=line_width(sys.stdout)), flush=True)
        if best is not None:
            print(wrap_lines(printable(best), line_width(sys.stdout)), flush=True)
        exit_code = _finish(planner, outcomes)
        if planner.settings.report:
            print_report(folder)
    return exit_code


def _chooser(planner: Planner) -> Grid | Search:
    """Return what chooses the jobs: a search if hydra/sweeper says so, else a grid."""
    command, sweep = planner.command, planner.settings
    sweeper = command.common.hydra.sweeper
    params = [f"{key}={value}" for key, value in sweeper.params.items()]
    overrides = command.read([*params, *command.overrides])  # the command's win
    if not planner.is_search:
        return Grid(overrides)
    assert sweep.objective is not None
    return Search(
        sweeper,
        overrides,
        folder=planner.folder,
        objective=sweep.objective,
        is_dry=sweep.dry_run,
        batch_size=sweep.parallel_jobs,
        retries=sweep.retry is not None,
    )


def _finish(planner: Planner, outcomes: Sequence[Outcome]) -> int:
    """Print what the user can do next; return the exit code of the worst job."""
    folder = planner.folder
    standings = {key: job.standing(folder) for key, job in read_plan(folder).jobs.items()}
    failed = {key: failed_outcome(one) for key, one in standings.items() if one.has_failed}
    num_failed = len(planner.queued & failed.keys())
    if any(outcome.status == Status.PREEMPTED for outcome in outcomes):
        print("the same command continues this sweep", flush=True)
    elif num_failed and planner.command.common.sweep.retry is None:
        jobs = counted(num_failed, "failed job")
        print(f"the same command with sweep.retry=failed runs {jobs} again", flush=True)
    if planner.is_search:  # earlier starts of the search count
        outcomes = [*outcomes, *failed.values()]
    elif not (outcomes or planner.queued):
        print_error("every job of the sweep is invalid and was skipped; see the reasons above")
        return EXIT_USER_ERROR
    return max((outcome.exit_code for outcome in outcomes), default=EXIT_COMPLETED)


def _run_batches(
    planner: Planner, chooser: Grid | Search, pool: ThreadPoolExecutor
) -> tuple[list[Outcome], str | None]:
    """Run all batches; return the outcomes, also of a signal, and a line about the best job."""
    rest: Future[tuple[list[Draft], JobBatch]] | None = None
    folder, num_failed, outcomes, is_first = planner.folder, 0, list[Outcome](), True
    while rest is not None or (words := chooser.ask()):
        if rest is not None:
            (drafts, batch), rest = rest.result(), None
        else:
            drafting = planner.draft(words, chooser.numbers)
            drafts = _first_drafts(planner, drafting)
            planner.num_jobs = len(words) if len(drafts) < len(words) else 0
            validate_resumed(drafts, skip_invalid=planner.settings.skip_invalid)
            faults = {None if draft.planned.is_skipped else draft.planned.fault for draft in drafts}
            if not planner.is_search and len(faults) == 1 and (fault := faults.pop()) is not None:
                raise UserError(fault)  # print a mistake in the whole command once
            if is_first:
                is_first = False
                change_plan(folder, partial(restarted, planner.command.words))
            batch = planner.queue(drafts)
            if planner.num_jobs:
                with stop_signals_held():  # also in the thread: this one gets the signals
                    rest = pool.submit(_plan_rest, planner, drafting)
        failed = [one.planned for one in drafts if one.job is None and not one.planned.is_skipped]
        outcomes += [Outcome(Status.FAILED, EXIT_USER_ERROR, job.fault) for job in failed]
        num_failed += len(failed)
        batch = replace(batch, num_failed=num_failed)
        ended = planner.executor.run(batch) if batch.jobs and not batch.must_stop(0) else {}
        outcomes += ended.values()
        batch_failures = batch.num_failures(ended)
        num_failed += batch_failures
        if isinstance(chooser, Search):
            chooser.tell(_results(planner, drafts))
        is_stopped = any(outcome.status == Status.PREEMPTED for outcome in ended.values())
        if is_stopped or (planner.is_search and batch.must_stop(batch_failures)):
            return outcomes, None
    if is_first:
        print(NO_TRIALS, flush=True)
    change_plan(folder, lambda plan: replace(plan, is_open=False))
    return outcomes, chooser.finish() if isinstance(chooser, Search) else None


def _first_drafts(planner: Planner, drafting: Iterable[Draft]) -> list[Draft]:
    """Return all jobs of a batch, but of a large new grid those that start first."""
    waits = planner.is_search or planner.settings.calibrate or isinstance(planner.executor, Slurm)
    resumes = any("resume=" in word for word in planner.command.overrides)
    if waits or resumes or read_plan(planner.folder).jobs:
        return [*drafting]
    drafts, start = list[Draft](), time.monotonic()
    for draft in drafting:
        drafts.append(draft)
        if time.monotonic() > start + PLANNING_S and any(one.job is not None for one in drafts):
            break
    return drafts


def _plan_rest(planner: Planner, drafting: Iterable[Draft]) -> tuple[list[Draft], JobBatch]:
    """Plan the jobs of a grid that are left; a thread does it while the first jobs run."""
    drafts = [draft for draft in drafting if draft.planned.job_id not in planner.queued]
    return drafts, planner.queue([] if planner.is_stopped else drafts)


def _results(planner: Planner, drafts: Sequence[Draft]) -> list[float | str | None]:
    """Return each job's objective, or the reason why it is missing, or None if it has not ended."""
    name, folder = planner.command.common.sweep.objective, planner.folder
    plan = read_plan(folder)
    jobs = [plan.jobs.get(draft.planned.job_id, draft.planned) for draft in drafts]
    return [
        job.fault or read_objective(folder / job.folder, job.standing(folder), name=name)
        for job in jobs
    ]


def _print_jobs(planner: Planner, drafts: Sequence[Draft]) -> int:
    """Print the table of a dry run, and return the exit code: 0 if all invalid jobs are skipped."""
    folder, width = planner.folder, line_width(sys.stdout)
    before, jobs = read_plan(folder), planner.jobs(drafts)
    planner.print_changes(before, planner.planned(drafts, before), jobs)
    rows = [DRY_COLUMNS]
    for job_id, job in jobs.items():
        config, (num_nodes, per_node) = job.config, planner.executor.layout(job.config)
        planned = before.jobs.get(job_id)
        device = f"{config.backend.device}, {config.backend.name}"
        steps = str((config.task == "train" and known_steps(config)) or "-")
        if planned is not None and planned.standing(folder).status == Status.COMPLETED:
            steps += f"  {Status.COMPLETED} already"
        rows.append((job.title, str(num_nodes), str(num_nodes * per_node), device, steps))
    invalid = [draft.planned for draft in drafts if draft.job is None]
    for rejected in invalid:
        status = "skipped" if rejected.is_skipped else "invalid"
        rows.append((str(shown_path(Path(rejected.folder))), "-", "-", "-", status))
    print("", *aligned(rows, width=width), sep="\n")
    for rejected in invalid:
        reason = f"{shown_path(Path(rejected.folder))}: {rejected.fault}"
        print(wrap_lines(printable(reason), width))
    counts = [counted(len(jobs), "valid job"), counted(len(invalid), "invalid job")]
    print(f"{', '.join(counts)}; nothing was started (sweep.dry_run=true)")
    if planner.is_search:
        print("a search chooses its later trials by the results of these" if jobs else NO_TRIALS)
    return EXIT_COMPLETED if all(job.is_skipped for job in invalid) else EXIT_USER_ERROR


def _is_search(common: DictConfig) -> bool:
    """Return whether Optuna chooses the jobs, and validate hydra/sweeper and the objective."""
    target = str(common.hydra.sweeper.get("_target_"))
    if target == f"{Grid.__module__}.{Grid.__name__}":
        return False
    if target != f"{Search.__module__}.{Search.__name__}":
        raise UserError(
            f"hydra/sweeper ({target}) is not supported",
            "write hydra/sweeper=optuna for a search, or leave hydra/sweeper out",
        )
    if common.sweep.objective is None:
        raise UserError(
            "sweep.objective is null, and a search needs the metric to optimize",
            "write sweep.objective=eval/accuracy",
        )
    return True
