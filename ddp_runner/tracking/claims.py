"""Which folder a run takes: its own, if it was begun before, else a new one. Torch-free.

On one machine our launcher claims the folder and holds its lock. Under torchrun, srun and mpirun,
and on several machines, rank 0 does. It finds the folder of a restarted launch by its marks: the
agents that watch the ranks (torchrun's, or our own launcher), and the scheduler's name for the job.
run.json keeps both. Two equal commands never share an agent, and an elastic worker group always
keeps one of its agents.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner.config.ranks import resolve_batch
from ddp_runner.config.schema import AUTO, OF_RANKS, RunConfig, flatten, leaves, work_hash
from ddp_runner.dist_env import DistEnv, continues
from ddp_runner.errors import UserError, listed
from ddp_runner.files import read_yaml
from ddp_runner.job import Job, Status
from ddp_runner.tracking.outputs import claim, run_folder, sibling_runs
from ddp_runner.tracking.run_dir import InUseError, RunDir
from ddp_runner.tracking.run_record import read_run_record, write_run_record

PATIENCE_S = 20.0  # for the ranks of an earlier attempt to release the folder
POLL_S = 0.1
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Claim:
    """The run folder, and what the run in it has fixed already."""

    run_dir: RunDir
    global_size: int | None  # samples per optimizer step; None: as configured


def claim_run(job: Job, *, marks: Sequence[str], stack: ExitStack) -> Claim:
    """Return the folder of this run, whose lock the stack holds from now on; rank 0 only.

    Raises:
        UserError: another process holds the folder, or it holds another run.
    """
    if job.wire is not None and job.config.launch.nnodes == 1:
        assert job.run_dir is not None
        return Claim(RunDir(job.run_dir), None)
    asked = RunDir(job.run_dir) if job.run_dir else None
    work, config = work_hash(job.config), job.config
    own = take_own(config, asked=asked, marks=marks, stack=stack)
    if asked and not own:
        goes_on(config, asked)
    run_dir = own or asked or unfinished_or_new(config)
    if own is None:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_dir.locked())
    run_dir.ensure_writable()
    earlier = read_run_record(run_dir, missing_ok=True)
    note_launch(run_dir, marks)
    write_run_record(run_dir, status=Status.RUNNING, work_hash=work)
    # Else the config has it already.
    keeps_size = config.resume in (None, AUTO)
    return Claim(run_dir, _global_size(run_dir) if earlier and keeps_size else None)


def take_own(
    config: RunConfig, *, asked: RunDir | None, marks: Sequence[str], stack: ExitStack
) -> RunDir | None:
    """Return the folder that an earlier attempt of this launch left, and lock it; None if none did.

    The earlier attempt may be about to end still. An equal command of the same job may take the
    folder first; then another one may be left for this command.

    Args:
        config: of this launch.
        asked: the folder that the user names.
        marks: of this launch.
        stack: holds the lock from now on.

    Raises:
        UserError: another process holds the folder.
    """
    work, deadline = work_hash(config), time.monotonic() + PATIENCE_S
    runs = [asked] if asked else sibling_runs(config)[::-1]  # a job's commands began in this order
    while own := [run for run in runs if _is_own(run, marks=marks, work=work)]:
        for run in own:
            is_last_try = time.monotonic() > deadline
            with ExitStack() as held, nullcontext() if is_last_try else suppress(InUseError):
                held.enter_context(run.locked())
                if _is_own(run, marks=marks, work=work):
                    stack.enter_context(held.pop_all())
                    return run
        time.sleep(POLL_S)
    return None


def note_launch(run_dir: RunDir, marks: Sequence[str]) -> None:
    """Add the marks of a launch to run.json; its process holds the folder's lock."""
    if marks:
        launches = sorted({*_marks_in(_record(run_dir)), *marks})
        write_run_record(run_dir, launches=launches)


def goes_on(config: RunConfig, run_dir: RunDir) -> bool:
    """Return whether resume=auto finds the same work in the folder that the user names.

    Raises:
        UserError: the folder holds a run that `resume` does not name.
    """
    if config.resume in (None, AUTO):
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
    if config.resume in (None, AUTO) and run_dir.record.exists():
        raise UserError(
            f"{run_dir} already holds a run; give another folder, or {run_dir.resume_argument}"
        )
    return False


def unfinished_or_new(config: RunConfig) -> RunDir:
    """Return the unfinished run that resume=auto goes on with, else a new folder."""
    runs = sibling_runs(config, names_others=True) if config.resume == AUTO else []
    return find_unfinished_run(runs, work=work_hash(config)) or RunDir(claim(run_folder(config)))


def find_unfinished_run(runs: Iterable[RunDir], *, work: str) -> RunDir | None:
    """Return the first unfinished run of this work that no process holds."""
    for run_dir in runs:
        record = _record(run_dir)
        is_unfinished = record.get("status") in (Status.RUNNING, Status.PREEMPTED, Status.FAILED)
        if record.get("work_hash") == work and is_unfinished and run_dir.is_held is False:
            return run_dir
    return None


def freeze(job: Job, run_dir: RunDir) -> None:
    """Write the job's config into its run folder; rank 0 or the launcher.

    Raises:
        UserError: it cannot be written.
    """
    written = job.secrets.written(job.config)
    run_dir.freeze(written, overrides=job.overrides, choices=job.choices)


def with_global_size(config: RunConfig, global_size: int | None) -> RunConfig:
    """Return the config with the global batch that its run began with, split among its ranks.

    torchrun may restart a run on fewer machines, or on more.

    Raises:
        UserError: the ranks do not divide it.
    """
    if global_size in (None, config.batch.global_size):
        return config
    batch = replace(config.batch, global_size=global_size)
    config = replace(config, batch=batch)
    return replace(config, batch=resolve_batch(config, config.world_size))


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


def _is_own(run_dir: RunDir, *, marks: Sequence[str], work: str) -> bool:
    """Return whether an earlier attempt of this launch left the folder."""
    record = _record(run_dir)
    left = _marks_in(record)
    return record.get("work_hash") == work and any(continues(mark, left) for mark in marks)


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
    except Exception:  # odd tags make PyYAML raise errors of any class
        return []  # it is missing or damaged
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
    path = run_dir.config
    try:
        batch = read_yaml(path)["batch"]
        return int(batch["global_size"])
    except Exception as error:  # odd tags make PyYAML raise errors of any class
        raise UserError(
            f"{path} is damaged ({type(error).__name__}); restore it, or give another folder"
        ) from error
