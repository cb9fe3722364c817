"""Finds the folder of a restarted run, or creates a new one, and locks it. Torch-free.

On one machine our launcher claims the folder; under another launcher, or on several machines,
rank 0 does. A restarted launch finds its folder by the launch ids in run.json: the agents that
watched the ranks (torchrun's, or our launcher) and the scheduler's job. Equal commands never share
an agent.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from ddp_runner.config.identity import RANK_KEYS, flatten, leaves, work_hash
from ddp_runner.config.load import frozen_config
from ddp_runner.config.resolve import resolve_batch
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.sections import AUTO
from ddp_runner.dist_env import DistEnv, continues, launch_id
from ddp_runner.errors import UserError, listed
from ddp_runner.job import Job, Status
from ddp_runner.tracking.outputs import claim, run_folder, sibling_runs
from ddp_runner.tracking.run_dir import InUseError, RunDir
from ddp_runner.tracking.run_record import (
    RunFields,
    has_taken_step,
    intact_record,
    read_run_record,
    start_session,
    write_run_record,
)

PATIENCE_S, POLL_S = 20.0, 0.2  # wait for an earlier attempt's ranks to release the folder
UNFINISHED = (Status.RUNNING, Status.PREEMPTED, Status.FAILED)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def claim_run(job: Job, *, launch_ids: Sequence[str], held: ExitStack) -> tuple[RunDir, int | None]:
    """Find or create the folder of this run, and lock it.

    The job's `run_dir` is the folder that the user named. `held` holds the lock from now on.

    Returns:
        The folder, and the global batch size that an earlier start of its run fixed; None: as
        configured.

    Raises:
        UserError: another process holds the folder, or it holds another run.
    """
    config, named = job.config, RunDir(job.run_dir) if job.run_dir else None
    work, run_dir = work_hash(config), None
    if launch_ids:
        run_dir = _lock_first(
            # Oldest first: a job's commands began in the order of their folders.
            [named] if named else sibling_runs(config)[::-1],
            work,
            lambda record: any(continues(one, _launch_ids(record)) for one in launch_ids),
            held,
            wait_s=PATIENCE_S,
        )
    if run_dir is None and named is None and config.resume == AUTO:
        # `is_held` is None where the file system has no locks.
        runs = [run for run in sibling_runs(config, names_others=True) if run.is_held is False]
        with suppress(InUseError):  # another command took the last of them
            run_dir = _lock_first(
                runs, work, lambda record: record.get("status") in UNFINISHED, held, wait_s=0.0
            )
    run_dir = run_dir or _lock_new(config, named, held)
    earlier = read_run_record(run_dir, missing_ok=True)
    if launch_ids:
        fields = RunFields(launches=sorted({*_launch_ids(earlier), *launch_ids}))
        if not has_taken_step(earlier):
            fields |= RunFields(status=Status.RUNNING, work_hash=work)
        write_run_record(run_dir, **fields)
        os.utime(run_dir.holder)  # so that ``alive`` sees the start
    # With resume=RUN, the config already has the run's batch size.
    if earlier and config.resume in (None, AUTO) and run_dir.is_frozen:
        return run_dir, frozen_config(run_dir.config).batch.global_size
    return run_dir, None


def _lock_new(config: RunConfig, named: RunDir | None, held: ExitStack) -> RunDir:
    """Create and lock the folder of a new run, or of the run that ``resume`` names."""
    run_dir = named or RunDir(claim(run_folder(config)))
    run_dir.path.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(run_dir.locked())
    except UserError:
        run_dir.discard_unused()
        raise
    if named is not None:
        _reject_another_run(config, run_dir)
    return run_dir


def with_run_folder(job: Job, run_dir: RunDir, global_size: int | None) -> Job:
    """Return the job with its run folder and the global batch size of the run's first start.

    torchrun may restart a run on fewer or on more machines.

    Raises:
        UserError: the number of ranks does not divide the global batch.
    """
    job, config = replace(job, run_dir=run_dir.path.absolute()), job.config
    if global_size in (None, config.batch.global_size):
        return job
    config = replace(config, batch=replace(config.batch, global_size=global_size))
    return replace(job, config=replace(config, batch=resolve_batch(config, config.world_size)))


def prepare_run_folder(job: Job) -> None:
    """Freeze the config of a new run and begin its session in run.json.

    Leave a run that has taken steps unchanged until its state is restored: a mistake in the command
    or a damaged checkpoint may still end the resume.

    Raises:
        UserError: the folder cannot be written, or its run.json is damaged.
    """
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    if not run_dir.is_frozen:
        run_dir.freeze(job)
    if not has_taken_step(read_run_record(run_dir, missing_ok=True)):
        fields = RunFields(status=Status.RUNNING, error=None, work_hash=work_hash(job.config))
        start_session(run_dir, started_at=job.started_at, **fields)


def _lock_first(
    runs: Sequence[RunDir],
    work: str,
    fits: Callable[[Mapping[str, Any]], bool],
    held: ExitStack,
    *,
    wait_s: float,
) -> RunDir | None:
    """Lock and return the first free run of this `work` whose record fits; None if none does.

    The earlier attempt may still be shutting down. If an equal command of the same job takes a
    folder first, try the next folder.

    Raises:
        InUseError: another process still holds a fitting run after `wait_s` seconds.
    """

    def is_right(run_dir: RunDir) -> bool:
        record = intact_record(run_dir)
        return record.get("work_hash") == work and fits(record)

    deadline = time.monotonic() + wait_s
    while runs := [run for run in runs if is_right(run)]:
        is_last_try, in_use = time.monotonic() >= deadline, None
        for run_dir in runs:
            try:
                with ExitStack() as lock:
                    lock.enter_context(run_dir.locked())
                    if is_right(run_dir):
                        held.enter_context(lock.pop_all())
                        return run_dir
            except InUseError as error:
                in_use = error
        if is_last_try and in_use:
            raise in_use
        time.sleep(POLL_S)
    return None


def _reject_another_run(config: RunConfig, run_dir: RunDir) -> None:
    """Reject a folder with a run, unless ``resume`` names it or auto finds the same config."""
    if config.resume not in (None, AUTO):
        return
    clear_if_unbegun(run_dir)
    earlier_work = intact_record(run_dir).get("work_hash") if config.resume == AUTO else None
    if earlier_work is None and run_dir.record.exists():
        raise UserError(
            f"{run_dir} already holds a run", f"give another folder, or {run_dir.resume_argument}"
        )
    if earlier_work not in (None, work_hash(config)):
        keys = listed([key for key in changed_values(config, run_dir) if key not in RANK_KEYS])
        raise UserError(
            f"{run_dir} holds a run whose config differs ({keys or 'values from the environment'}),"
            " and resume=auto only continues a run with the same config",
            "give another hydra.run.dir",
        )


def clear_if_unbegun(run_dir: RunDir) -> None:
    """Empty the folder of a run that a user's mistake ended before its first step."""
    diffs = [*run_dir.path.glob("code-*.diff")]
    created = {run_dir.config.parent, run_dir.lock, run_dir.holder, run_dir.logs, run_dir.record}
    created.update(diffs)
    error = intact_record(run_dir).get("error")
    is_mistake = isinstance(error, Mapping) and error.get("kind") == "user"
    if is_mistake and created.issuperset(run_dir.path.iterdir()):
        shutil.rmtree(run_dir.logs, ignore_errors=True)
        shutil.rmtree(run_dir.config.parent, ignore_errors=True)
        for path in (*diffs, run_dir.record):
            path.unlink()


def own_launch_ids(env: DistEnv, *, has_agent: bool) -> list[str]:
    """Return this rank's launch ids; the parent process counts only if it watches the rank."""
    agent = _agent() if has_agent or env.launcher == "torchrun" else None
    return [*filter(None, (agent, launch_id()))]


def _agent() -> str:
    """Return an id of the process that started this rank: host, boot, process id, start time."""
    pid = os.getppid()
    boot = BOOT_ID.read_text().strip()[:8] if BOOT_ID.exists() else "-"
    stat = Path(f"/proc/{pid}/stat")
    # Process ids are reused, so add the start time, in ticks since the boot. macOS has no /proc.
    started = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "-"
    return f"agent {socket.gethostname()} {boot} {pid} {started}"


def _launch_ids(record: Mapping[str, Any]) -> list[str]:
    launch_ids = record.get("launches")
    return list(map(str, launch_ids)) if isinstance(launch_ids, list) else []


def changed_values(config: RunConfig, run_dir: RunDir) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a config that differ from the run in a folder, with old and new value.

    ``batch.per_rank`` is left out: it follows from the global batch and the number of ranks.

    Raises:
        UserError: the run's frozen config is damaged.
    """
    frozen = dict(leaves(cast(Any, OmegaConf.to_container(frozen_config(run_dir.config)))))
    current = json.loads(json.dumps(flatten(config)))  # lists for tuples, as in YAML
    return {
        key: (frozen.get(key, "not set"), value)
        for key, value in current.items()
        # A secret is frozen as ${oc.env:X}.
        if key != "batch.per_rank" and frozen.get(key) != value and "${" not in str(frozen.get(key))
    }
