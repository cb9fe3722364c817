"""Runs one planned job in its folder; called by ``__main__``, ``multirun`` and ``slots``."""

import sys
from typing import Any

from ddp_runner.environment import dist_env
from ddp_runner.folders import freeze_config
from ddp_runner.interrupts import mark_ended
from ddp_runner.job import Job, Outcome, Slot
from ddp_runner.launch import launch
from ddp_runner.times import begin_session


def execute(job: Job) -> Outcome:
    """Run a job in its folder, whose lock is held."""
    assert job.run_dir is not None
    written = job.secrets.written(job.config)
    freeze_config(job.run_dir, written, overrides=job.overrides, choices=job.choices)
    begin_session(
        job.run_dir, status="running", started_at=job.started_at, error=None, **_place(job.slot)
    )
    try:
        return told(launch(job))
    except SystemExit:  # a signal before the launcher had begun to answer them
        mark_ended(job.run_dir)
        raise


def told(outcome: Outcome) -> Outcome:
    """Print how a job failed, if it did; return its outcome."""
    if outcome.failure is not None:
        complain(outcome.failure.sentence)
        if outcome.failure.kind != "user":
            print(outcome.failure.traceback, file=sys.stderr, flush=True)
    return outcome


def complain(sentence: str) -> None:
    """Print one line to stderr; of the ranks of a machine, which stumble alike, one speaks."""
    env = dist_env()
    if env is None or env.local_rank == 0:
        print(f"error: {sentence}", file=sys.stderr, flush=True)


def _place(slot: Slot | None) -> dict[str, Any]:
    """Return what run.json says of a run beside others; it stays said if the run goes on alone."""
    if slot is None:
        return {}
    return {"packed": True, "cores": slot.cores, "cuda_visible_devices": slot.gpus}
