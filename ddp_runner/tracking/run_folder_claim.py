"""Which folder a run takes: its own, if it was begun before, else a new one. Torch-free.

On one machine our launcher claims the folder and holds its lock. Under torchrun, srun and mpirun,
and on several machines, rank 0 does. Each finds the folder of a restarted launch by its ids: the
agents that watch the ranks (torchrun's, or our own launcher), and the scheduler's name for the job.
run.json keeps both. Two equal commands never share an agent.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from ddp_runner.config.identity import OF_RANKS, flatten, leaves, work_hash
from ddp_runner.config.load import frozen_config
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.sections import AUTO
from ddp_runner.config.world_size import resolve_batch
from ddp_runner.dist_env import DistEnv, continues
from ddp_runner.errors import UserError, listed
from ddp_runner.job import Job, Status
from ddp_runner.tracking.outputs import claim, run_folder, sibling_runs
from ddp_runner.tracking.run_dir import InUseError, RunDir
from ddp_runner.tracking.run_record import (
    RunFields,
    begin_session,
    has_begun,
    read_run_record,
    write_run_record,
)

PATIENCE_S, POLL_S = 20.0, 0.2  # for the ranks of an earlier attempt to release the folder
UNFINISHED = (Status.RUNNING, Status.PREEMPTED, Status.FAILED)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def claim_run(job: Job, *, launch_ids: Sequence[str], held: ExitStack) -> tuple[RunDir, int | None]:
    """Lock the folder of this run; by the launcher, or by rank 0 of another one.

    Args:
        job: its `run_dir` is the folder that the user names.
        launch_ids: of this launch, see ``own_launch_ids``.
        held: holds the lock from now on.

    Returns:
        The folder, and the samples per optimizer step that the run in it has fixed already. None:
        as configured.

    Raises:
        UserError: another process holds the folder, or it holds another run.
    """
    config, asked = job.config, RunDir(job.run_dir) if job.run_dir else None
    work, run_dir = work_hash(config), None

    def is_own(record: Mapping[str, Any]) -> bool:
        left = _marks_in(record)
        return record.get("work_hash") == work and any(continues(mark, left) for mark in launch_ids)

    def is_unfinished(record: Mapping[str, Any]) -> bool:
        return record.get("work_hash") == work and record.get("status") in UNFINISHED

    if launch_ids:  # a job's commands began in the order of their folders
        runs = [asked] if asked else sibling_runs(config)[::-1]
        run_dir = _take(runs, is_own, held, wait_s=PATIENCE_S)
    if run_dir is None and asked is None and config.resume == AUTO:
        # Of some folders nobody can tell whether they are held: None.
        runs = [one for one in sibling_runs(config, names_others=True) if one.is_held is False]
        with suppress(InUseError):
            run_dir = _take(runs, is_unfinished, held, wait_s=0.0)
    if run_dir is None:
        run_dir = asked or RunDir(claim(run_folder(config)))
        run_dir.path.mkdir(parents=True, exist_ok=True)
        try:
            with ExitStack() as lock:
                lock.enter_context(run_dir.locked())
                if asked is not None:
                    _reject_another_run(config, run_dir)
                held.enter_context(lock.pop_all())
        except UserError:
            run_dir.discard_unused()  # it may have been made just now
            raise
    earlier = read_run_record(run_dir, missing_ok=True)
    if launch_ids:
        fields = RunFields(launches=sorted({*_marks_in(earlier), *launch_ids}))
        if not has_begun(earlier):
            fields |= RunFields(status=Status.RUNNING, work_hash=work)
        write_run_record(run_dir, **fields)
        os.utime(run_dir.holder)  # so that ``alive`` sees the start
    if earlier and config.resume in (None, AUTO) and run_dir.is_frozen:  # else the config has it
        return run_dir, frozen_config(run_dir.config).batch.global_size
    return run_dir, None


def claimed(job: Job, run_dir: RunDir, global_size: int | None) -> Job:
    """Return the job in its run folder, with the global batch that its run began with.

    torchrun may restart a run on fewer machines, or on more.

    Raises:
        UserError: the ranks do not divide that batch.
    """
    job, config = replace(job, run_dir=run_dir.path.absolute()), job.config
    if global_size in (None, config.batch.global_size):
        return job
    config = replace(config, batch=replace(config.batch, global_size=global_size))
    return replace(job, config=replace(config, batch=resolve_batch(config, config.world_size)))


def begin_run(job: Job) -> None:
    """Freeze the config of a claimed run, and begin its session in run.json.

    A run that has taken a step before stays as it is until its state is restored: what is wrong
    with the command, or with the checkpoint, may still end the resume.

    Raises:
        UserError: the folder cannot be written, or its run.json is damaged.
    """
    assert job.run_dir is not None
    run_dir = RunDir(job.run_dir)
    if not run_dir.is_frozen:
        freeze(job, run_dir)
    if not has_begun(read_run_record(run_dir, missing_ok=True)):
        work = work_hash(job.config)
        status = Status.RUNNING
        begin_session(run_dir, started_at=job.started_at, status=status, error=None, work_hash=work)


def _take(
    runs: Sequence[RunDir],
    fits: Callable[[Mapping[str, Any]], bool],
    held: ExitStack,
    *,
    wait_s: float,
) -> RunDir | None:
    """Return the first run whose record fits and that no process holds, and lock it; None if none.

    An earlier attempt may still be shutting down. An equal command of the same job may take a
    folder first; then another one may be left for this command.

    Raises:
        InUseError: after `wait_s` seconds another process still holds one that fits.
    """
    deadline = time.monotonic() + wait_s
    while runs := [one for one in runs if fits(_record(one))]:
        is_last_try, in_use = time.monotonic() >= deadline, None
        for run_dir in runs:
            try:
                with ExitStack() as lock:
                    lock.enter_context(run_dir.locked())
                    if fits(_record(run_dir)):
                        held.enter_context(lock.pop_all())
                        return run_dir
            except InUseError as error:
                in_use = error
        if is_last_try and in_use:
            raise in_use
        time.sleep(POLL_S)
    return None


def _reject_another_run(config: RunConfig, run_dir: RunDir) -> None:
    """Reject a folder that holds a run, unless ``resume`` names it or auto finds its own work."""
    if config.resume not in (None, AUTO):
        return
    run_dir.clear_if_unbegun()
    known = _record(run_dir).get("work_hash") if config.resume == AUTO else None
    if known is None and run_dir.record.exists():
        raise UserError(
            f"{run_dir} already holds a run; give another folder, or {run_dir.resume_argument}"
        )
    if known not in (None, work_hash(config)):
        keys = listed(changed_keys(config, run_dir)) or "what the environment gives"
        raise UserError(
            f"{run_dir} holds a run whose config differs ({keys}), and resume=auto continues an "
            "equal one only; give another hydra.run.dir"
        )


def freeze(job: Job, run_dir: RunDir, *, sync: bool = True) -> None:
    """Write the job's config into its run folder; rank 0 or the launcher.

    Raises:
        UserError: it cannot be written.
    """
    written = job.secrets.written(job.config)
    run_dir.freeze(written, overrides=job.overrides, choices=job.choices, sync=sync)


def own_launch_ids(env: DistEnv, *, has_agent: bool) -> list[str]:
    """Return this rank's launch ids; an agent's only if it watches the rank."""
    launch_ids = [_agent()] if has_agent or env.launcher == "torchrun" else []
    return launch_ids + ([env.launch_id] if env.launch_id else [])


def _agent() -> str:
    """Return the process that started this rank: host, boot, process id and start time."""
    pid = os.getppid()
    boot = BOOT_ID.read_text().strip()[:8] if BOOT_ID.exists() else "-"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        started = stat.rpartition(")")[2].split()[19]  # in ticks since the boot: ids are reused
    except OSError:
        started = "-"  # no /proc, as on macOS
    return f"agent {socket.gethostname()} {boot} {pid} {started}"


def _marks_in(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of all launches of a run, from its run.json."""
    launch_ids = record.get("launches")
    return [str(one) for one in launch_ids] if isinstance(launch_ids, list) else []


def _record(run_dir: RunDir) -> dict[str, Any]:
    """Return a folder's run.json; no fields if there is none, or if it is damaged."""
    try:
        return read_run_record(run_dir, missing_ok=True)
    except UserError:
        return {}  # nobody can resume such a run


def changed_keys(config: RunConfig, run_dir: RunDir) -> list[str]:
    """Return the keys of a config whose values the run in a folder does not have.

    Raises:
        UserError: its frozen config is damaged.
    """
    frozen = dict(leaves(cast(Any, OmegaConf.to_container(frozen_config(run_dir.config)))))
    own = json.loads(json.dumps(flatten(config)))  # lists for tuples, as in YAML
    return [
        key
        for key, value in own.items()
        # A secret is frozen as it was written.
        if key not in OF_RANKS and frozen.get(key) != value and "${" not in str(frozen.get(key))
    ]
