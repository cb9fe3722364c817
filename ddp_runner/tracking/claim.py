"""Which folder a run takes: its own, if it was begun before, else a new one. Torch-free.

On one machine our launcher claims the folder and holds its lock. Under torchrun, srun and mpirun,
and on several machines, rank 0 does. Each finds the folder of a restarted launch by its marks: the
agents that watch the ranks (torchrun's, or our own launcher), and the scheduler's name for the job.
run.json keeps both. Two equal commands never share an agent.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner.config.identity import OF_RANKS, flatten, leaves, work_hash
from ddp_runner.config.ranks import resolve_batch
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.sections import AUTO
from ddp_runner.dist_env import DistEnv, continues
from ddp_runner.errors import UserError, listed
from ddp_runner.files import read_yaml
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


@dataclass(frozen=True)
class Claim:
    """The run folder, and what the run in it has fixed already."""

    run_dir: RunDir
    global_size: int | None  # samples per optimizer step; None: as configured


def claim_run(job: Job, *, marks: Sequence[str], held: ExitStack) -> Claim:
    """Return the folder of this run, and lock it; by the launcher, or by rank 0 of another one.

    Args:
        job: its `run_dir` is the folder that the user names.
        marks: of this launch, see ``own_marks``.
        held: holds the lock from now on.

    Raises:
        UserError: another process holds the folder, or it holds another run.
    """
    config, asked = job.config, RunDir(job.run_dir) if job.run_dir else None
    run_dir = _own_run(config, asked, marks, held) if marks else None
    if run_dir is None and asked is None and config.resume == AUTO:
        run_dir = _unfinished_run(config, held)
    if run_dir is None:
        run_dir = asked or RunDir(claim(run_folder(config)))
        run_dir.path.mkdir(parents=True, exist_ok=True)
        try:
            _locked_if(lambda one: asked is None or _is_resumable(config, one), run_dir, held)
        except UserError:
            run_dir.discard_unused()  # it may have been made just now
            raise
    earlier = read_run_record(run_dir, missing_ok=True)
    if marks:
        fields = RunFields(launches=sorted({*_marks_in(earlier), *marks}))
        if not has_begun(earlier):
            fields |= RunFields(status=Status.RUNNING, work_hash=work_hash(config))
        write_run_record(run_dir, **fields)
        os.utime(run_dir.holder)  # so that ``alive`` sees the start
    keeps_size = config.resume in (None, AUTO)  # else the config has it already
    return Claim(run_dir, _global_size(run_dir) if earlier and keeps_size else None)


def claimed(job: Job, claim: Claim) -> Job:
    """Return the job in its run folder, with the global batch that its run began with.

    torchrun may restart a run on fewer machines, or on more.

    Raises:
        UserError: the ranks do not divide that batch.
    """
    job, config = replace(job, run_dir=claim.run_dir.path.absolute()), job.config
    if claim.global_size in (None, config.batch.global_size):
        return job
    config = replace(config, batch=replace(config.batch, global_size=claim.global_size))
    return replace(job, config=replace(config, batch=resolve_batch(config, config.world_size)))


def begin_run(job: Job, run_dir: RunDir) -> None:
    """Freeze the config of a claimed run, and begin its session in run.json.

    A run that has taken a step before stays as it is until its state is restored: what is wrong
    with the command, or with the checkpoint, may still end the resume.

    Raises:
        UserError: the folder cannot be written, or its run.json is damaged.
    """
    if not run_dir.is_frozen:
        freeze(job, run_dir)
    if not has_begun(read_run_record(run_dir, missing_ok=True)):
        work = work_hash(job.config)
        status = Status.RUNNING
        begin_session(run_dir, started_at=job.started_at, status=status, error=None, work_hash=work)


def _own_run(
    config: RunConfig, asked: RunDir | None, marks: Sequence[str], held: ExitStack
) -> RunDir | None:
    """Return the folder that an earlier attempt of this launch left, and lock it; None if none did.

    The earlier attempt may be about to end still. An equal command of the same job may take the
    folder first; then another one may be left for this command.
    """
    work, deadline = work_hash(config), time.monotonic() + PATIENCE_S

    def is_own(run_dir: RunDir) -> bool:
        record = _record(run_dir)
        left = _marks_in(record)
        return record.get("work_hash") == work and any(continues(mark, left) for mark in marks)

    # A job's commands began in this order.
    own = [run for run in ([asked] if asked else sibling_runs(config)[::-1]) if is_own(run)]
    while own:
        is_last_try = time.monotonic() > deadline
        for run_dir in own:
            try:
                if _locked_if(is_own, run_dir, held):
                    return run_dir
            except InUseError:
                if is_last_try:
                    raise
        time.sleep(POLL_S)
        own = [run for run in own if is_own(run)]
    return None


def _unfinished_run(config: RunConfig, held: ExitStack) -> RunDir | None:
    """Return the newest unfinished run of this work that no process holds, and lock it."""
    work = work_hash(config)

    def is_unfinished(run_dir: RunDir) -> bool:
        record = _record(run_dir)
        return record.get("work_hash") == work and record.get("status") in UNFINISHED

    for run_dir in sibling_runs(config, names_others=True):
        # Nobody can tell whether it is held: None.
        if not is_unfinished(run_dir) or run_dir.is_held is not False:
            continue
        with suppress(InUseError):
            if _locked_if(is_unfinished, run_dir, held):
                return run_dir
    return None


def _locked_if(condition: Callable[[RunDir], bool], run_dir: RunDir, held: ExitStack) -> bool:
    """Lock a folder, and keep the lock if the condition holds then; return whether it does."""
    with ExitStack() as lock:
        lock.enter_context(run_dir.locked())
        if holds := condition(run_dir):
            held.enter_context(lock.pop_all())
    return holds


def _is_resumable(config: RunConfig, run_dir: RunDir) -> bool:
    """Reject a folder that holds a run, unless ``resume`` names it or auto finds its own work."""
    if config.resume not in (None, AUTO):
        return True
    run_dir.clear_if_unbegun()
    known = _record(run_dir).get("work_hash") if config.resume == AUTO else None
    if known == work_hash(config):
        return True
    if known is not None:
        keys = _changed_keys(config, run_dir)
        raise UserError(
            f"{run_dir} holds a run whose config differs{f' ({listed(keys)})' if keys else ''}, "
            "and resume=auto goes on with an equal one only; give another hydra.run.dir"
        )
    if run_dir.record.exists():
        raise UserError(
            f"{run_dir} already holds a run; give another folder, or {run_dir.resume_argument}"
        )
    return True


def freeze(job: Job, run_dir: RunDir, *, sync: bool = True) -> None:
    """Write the job's config into its run folder; rank 0 or the launcher.

    Raises:
        UserError: it cannot be written.
    """
    written = job.secrets.written(job.config)
    run_dir.freeze(written, overrides=job.overrides, choices=job.choices, sync=sync)


def own_marks(env: DistEnv, *, has_agent: bool) -> list[str]:
    """Return this rank's marks, of an agent only if one watches it: torchrun's or our launcher."""
    marks = [_agent()] if has_agent or env.launcher == "torchrun" else []
    return marks + ([env.launch_id] if env.launch_id else [])


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
    """Return the marks of all launches of a run, from its run.json."""
    marks = record.get("launches")
    return [str(one) for one in marks] if isinstance(marks, list) else []


def _record(run_dir: RunDir) -> dict[str, Any]:
    """Return a folder's run.json; no fields if there is none, or if it is damaged."""
    try:
        return read_run_record(run_dir, missing_ok=True)
    except UserError:
        return {}  # nobody can resume such a run


def _changed_keys(config: RunConfig, run_dir: RunDir) -> list[str]:
    """Return the keys of a config whose values the run in a folder does not have."""
    try:
        frozen = dict(leaves(read_yaml(run_dir.config)))
    except Exception:  # missing or damaged: odd tags make PyYAML raise errors of any class
        return []
    own = json.loads(json.dumps(flatten(config)))  # lists for tuples, as in YAML
    return [
        key
        for key, value in own.items()
        # A secret is frozen as it was written.
        if key not in OF_RANKS and frozen.get(key) != value and "${" not in str(frozen.get(key))
    ]


def _global_size(run_dir: RunDir) -> int | None:
    """Return the frozen config's global batch; None if it was never frozen."""
    if not run_dir.is_frozen:
        return None
    try:
        return int(read_yaml(run_dir.config)["batch"]["global_size"])
    except Exception as error:  # odd tags make PyYAML raise errors of any class
        what = f"{run_dir.config} is damaged ({type(error).__name__})"
        raise UserError(f"{what}; restore it, or give another folder") from error
