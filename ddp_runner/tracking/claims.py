"""How rank 0 comes to the run folder where no launcher of ours holds it already.

Under torchrun, srun and mpirun, and on several machines: it takes the folder that an earlier
attempt of the same launch left, or the one that ``resume`` names, or claims a new one; and it holds
the folder's lock for as long as it runs. Torch-free.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ddp_runner.config.batch import num_shares, resolve_batch
from ddp_runner.config.schema import Config, work_hash
from ddp_runner.errors import UserError
from ddp_runner.job import Job, Status
from ddp_runner.tracking.launch_marks import (
    find_own_run,
    find_unfinished_run,
    is_own_run,
    is_same_work,
    marks_in,
)
from ddp_runner.tracking.run_dir import (
    claim,
    ensure_writable,
    freeze_config,
    locked,
    resume_argument,
    run_folder,
    sibling_runs,
)
from ddp_runner.tracking.run_record import RUN_RECORD, read_run_record, write_run_record

AUTO = "auto"  # the value of `resume` that looks for this config's newest unfinished run
PATIENCE_S = 20.0  # for the ranks of an earlier attempt to let go of the folder


@dataclass(frozen=True)
class Claim:
    """The run folder, and what the run that it holds has settled already."""

    folder: Path
    global_size: int | None  # samples of its optimizer step; None: the config's own


def claim_run(job: Job, *, marks: Sequence[str], stack: ExitStack) -> Claim:
    """Return the folder of this run; rank 0 only.

    Args:
        job: of this rank.
        marks: by which a launch is known again, of all ranks.
        stack: holds the folder's lock from now on.

    Raises:
        UserError: another process holds the folder, it is another run's, or this launch's last
            attempt failed for a reason that a restart cannot mend.
    """
    if job.scratch is not None and job.config.launch.nnodes == 1:
        assert job.run_dir is not None
        return Claim(job.run_dir, None)
    work, resume = work_hash(job.config), job.config.resume
    folder, is_own, goes_on = job.run_dir, False, resume not in (None, AUTO)
    if folder is not None:
        is_own = is_own_run(folder, marks=marks, work=work)
        may_go_on = is_own or goes_on or (resume == AUTO and is_same_work(folder, work=work))
        if (folder / RUN_RECORD).exists() and not may_go_on:
            raise UserError(
                f"{folder} already holds a run; give another folder, or {resume_argument(folder)}"
            )
    else:
        runs = sibling_runs(job.config)
        folder = find_own_run(runs, marks=marks, work=work)
        is_own = folder is not None
        if folder is None and resume == AUTO:
            folder = find_unfinished_run(runs, work=work)
        folder = folder or claim(run_folder(job.config))
    folder.mkdir(parents=True, exist_ok=True)
    ensure_writable(folder)
    stack.enter_context(locked(folder, patience_s=PATIENCE_S if is_own else 0.0))
    earlier = read_run_record(folder) if (folder / RUN_RECORD).exists() else {}
    _validate_earlier_failure(earlier, marks)
    known = {*marks_in(earlier), *marks}
    write_run_record(folder, status=Status.RUNNING, work_hash=work, launches=sorted(known))
    size = _global_size(folder) if earlier and not goes_on else None
    return Claim(folder, size)


def freeze(job: Job, run_dir: Path) -> None:
    """Write down what the run's config is from now on; rank 0 or the launcher.

    Raises:
        UserError: it cannot be written.
    """
    written = job.secrets.written(job.config)
    freeze_config(run_dir, written, overrides=job.overrides, choices=job.choices)


def with_global_size(config: Config, global_size: int | None, ranks: int) -> Config:
    """Return the config with the global batch that its run began with, cut for these ranks.

    Raises:
        UserError: it does not divide by the ranks.
    """
    if global_size is None or global_size == config.batch.global_size:
        return config
    batch = replace(config.batch, global_size=global_size, per_rank=None)
    config = replace(config, batch=batch)
    return replace(config, batch=resolve_batch(config, num_shares(config, ranks), ()))


def _validate_earlier_failure(earlier: dict[str, Any], marks: Sequence[str]) -> None:
    """Refuse to restart what would fail again: these agents saw it fail for the user's reason."""
    error = earlier.get("error")
    agents = {mark for mark in marks if mark.startswith("agent ")}
    is_restart = not agents.isdisjoint(marks_in(earlier))
    if is_restart and isinstance(error, dict) and error.get("kind") == "user":
        raise UserError(str(error.get("sentence")))


def _global_size(folder: Path) -> int | None:
    """Return the frozen config's global batch; None where the run was never frozen."""
    path = folder / ".hydra" / "config.yaml"
    if not path.exists():
        return None
    try:
        return int(yaml.safe_load(path.read_text(encoding="utf-8"))["batch"]["global_size"])
    except Exception as error:  # of any kind, as PyYAML makes of odd tags
        raise UserError(
            f"{path} is damaged ({type(error).__name__}); restore it, or give another folder"
        ) from error
