"""How rank 0 gets a run folder if no launcher of ours holds one already.

Under torchrun, srun and mpirun, and on several machines, rank 0 takes the folder that an earlier
attempt of the same launch left, or the one that ``resume`` names, or claims a new one. It holds the
folder's lock for as long as it runs. Torch-free.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import yaml

from ddp_runner.config.resolve import resolve_batch
from ddp_runner.config.schema import Config, work_hash
from ddp_runner.errors import UserError
from ddp_runner.job import Job, Status
from ddp_runner.tracking.launch_marks import (
    find_own_run,
    find_unfinished_run,
    is_same_work,
    marks_in,
)
from ddp_runner.tracking.outputs import claim, run_folder, sibling_runs
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record, write_run_record

AUTO = "auto"  # the value of `resume` that means this config's newest unfinished run
PATIENCE_S = 20.0  # for the ranks of an earlier attempt to release the folder


@dataclass(frozen=True)
class Claim:
    """The run folder, and what the run in it has fixed already."""

    run_dir: RunDir
    global_size: int | None  # samples per optimizer step; None: as configured


def claim_run(job: Job, *, marks: Sequence[str], stack: ExitStack) -> Claim:
    """Return the folder of this run; rank 0 only.

    Args:
        job: of this rank.
        marks: of all ranks, which identify the launch.
        stack: holds the folder's lock from now on.

    Raises:
        UserError: another process holds the folder, it holds another run, or this launch's last
            attempt failed for a reason that a restart cannot fix.
    """
    if job.scratch is not None and job.config.launch.nnodes == 1:
        assert job.run_dir is not None
        return Claim(RunDir(job.run_dir), None)
    work, resume = work_hash(job.config), job.config.resume
    resumes = resume not in (None, AUTO)
    if job.run_dir is not None:
        run_dir = RunDir(job.run_dir)
        is_own = find_own_run([run_dir], marks=marks, work=work) is not None
        may_resume = is_own or resumes or (resume == AUTO and is_same_work(run_dir, work=work))
        if run_dir.record.exists() and not may_resume:
            raise UserError(
                f"{run_dir} already holds a run; give another folder, or {run_dir.resume_argument}"
            )
    else:
        runs = sibling_runs(job.config)
        own = find_own_run(runs, marks=marks, work=work)
        is_own = own is not None
        unfinished = find_unfinished_run(runs, work=work) if resume == AUTO and not own else None
        run_dir = own or unfinished or RunDir(claim(run_folder(job.config)))
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.ensure_writable()
    stack.enter_context(run_dir.locked(patience_s=PATIENCE_S if is_own else 0.0))
    earlier = read_run_record(run_dir, missing_ok=True)
    _validate_earlier_failure(earlier, marks)
    launches = sorted({*marks_in(earlier), *marks})
    write_run_record(run_dir, status=Status.RUNNING, work_hash=work, launches=launches)
    size = _global_size(run_dir) if earlier and not resumes else None
    return Claim(run_dir, size)


def freeze(job: Job, run_dir: RunDir) -> None:
    """Write the job's config into its run folder; rank 0 or the launcher.

    Raises:
        UserError: it cannot be written.
    """
    written = job.secrets.written(job.config)
    run_dir.freeze(written, overrides=job.overrides, choices=job.choices)


def with_global_size(config: Config, global_size: int | None, ranks: int) -> Config:
    """Return the config with the global batch that its run began with, split among these ranks.

    Raises:
        UserError: the ranks do not divide it.
    """
    if global_size is None or global_size == config.batch.global_size:
        return config
    batch = replace(config.batch, global_size=global_size, per_rank=None)
    config = replace(config, batch=batch)
    return replace(config, batch=resolve_batch(config, ranks))


def _validate_earlier_failure(earlier: dict[str, Any], marks: Sequence[str]) -> None:
    """Raise the earlier error if these agents restart a run whose input is invalid."""
    error = earlier.get("error")
    agents = {mark for mark in marks if mark.startswith("agent ")}
    is_restart = not agents.isdisjoint(marks_in(earlier))
    if is_restart and isinstance(error, dict) and error.get("kind") == "user":
        raise UserError(str(error.get("sentence")))


def _global_size(run_dir: RunDir) -> int | None:
    """Return the frozen config's global batch; None if the run was never frozen."""
    path = run_dir.config
    if not run_dir.is_frozen:
        return None
    try:
        return int(yaml.safe_load(path.read_text(encoding="utf-8"))["batch"]["global_size"])
    except Exception as error:  # odd tags make PyYAML raise errors of any class
        raise UserError(
            f"{path} is damaged ({type(error).__name__}); restore it, or give another folder"
        ) from error
