"""Runs one planned job in its folder; called by ``__main__``, ``multirun`` and ``slots``."""

import sys
from typing import Any

from ddp_runner.config.schema import work_hash
from ddp_runner.dist_env import dist_env
from ddp_runner.host.streams import print_line
from ddp_runner.job import EXIT_USER_ERROR, Job, Outcome, Slot, Status
from ddp_runner.launch.launcher import launch
from ddp_runner.launch.signals import mark_ended
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_dir import is_frozen
from ddp_runner.tracking.run_record import RUN_RECORD, read_run_record, replace_run_record
from ddp_runner.tracking.times import begin_session, is_refused_resume


def execute(job: Job) -> Outcome:
    """Run a job in its folder, whose lock is held."""
    run_dir = job.run_dir
    assert run_dir is not None
    if not is_frozen(run_dir):
        freeze(job, run_dir)
    before = read_run_record(run_dir) if (run_dir / RUN_RECORD).exists() else {}
    begin_session(
        run_dir,
        status=Status.RUNNING,
        started_at=job.started_at,
        error=None,
        work_hash=work_hash(job.config),
        **_place(job.slot),
    )
    try:
        outcome = print_failure(launch(job))
    except SystemExit:  # a signal before the launcher had begun to answer them
        mark_ended(run_dir)
        raise
    if outcome.exit_code == EXIT_USER_ERROR and is_refused_resume(run_dir, before):
        replace_run_record(run_dir, before)
    return outcome


def print_failure(outcome: Outcome) -> Outcome:
    """Print how a job failed, if it did; return its outcome."""
    if outcome.failure is not None:
        print_error(outcome.failure.sentence)
        if outcome.failure.kind != "user":
            print(outcome.failure.traceback, file=sys.stderr, flush=True)
    return outcome


def print_error(sentence: str) -> None:
    """Print one line to stderr; of the ranks of a machine, which stumble alike, one speaks."""
    env = dist_env()
    if env is None or env.local_rank == 0:
        print_line(f"error: {sentence}", stream=sys.stderr)


def _place(slot: Slot | None) -> dict[str, Any]:
    """Return what run.json says of a run beside others; it stays said if the run goes on alone."""
    if slot is None:
        return {}
    return {"parallel_jobs": True, "cores": slot.cores, "cuda_visible_devices": slot.gpus}
