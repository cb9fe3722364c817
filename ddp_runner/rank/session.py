"""What every task of a rank needs, opened and closed around it; used by ``worker``.

A session is the process group, the run folder and its log, and the record that a run has begun.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config, config_hash, digest, flatten, work_hash
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import (
    ensure_agreement,
    ensure_own_devices,
    from_rank_zero,
    gather_objects,
)
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import detect
from ddp_runner.job import Failure, Job, Status
from ddp_runner.parallelism.mode import Mode
from ddp_runner.rank.cuda import open_devices
from ddp_runner.rank.process_group import process_group
from ddp_runner.rank.rank_log import RankLog
from ddp_runner.scratch import cause
from ddp_runner.tracking.claims import claim_run, freeze, with_global_size
from ddp_runner.tracking.launch_marks import own_marks
from ddp_runner.tracking.run_dir import is_frozen
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.times import begin_session

INIT_FILE = "file://"  # how a launch.init_method begins that is a file


@dataclass(frozen=True)
class Session:
    """One rank's part of an open run."""

    job: Job
    env: DistEnv
    mode: Mode
    devices: tuple[torch.device, ...]  # of this rank, as its mode wants them
    run_dir: Path
    log: Callable[[str], None]  # into this rank's log; rank 0 also prints it

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.job.config


@contextmanager
def open_session(job: Job, env: DistEnv) -> Iterator[Session]:
    """Set up this rank's process and join the others. Collective: every rank must call.

    Raises:
        UserError: the config names what it may not, the ranks were launched differently, or the
            run folder is another run's.
    """
    config = job.config
    validate_targets(config)  # again: a config may have come with a run that somebody else made
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    mode: Mode = make("parallelism", config.parallelism, kind=Mode, allowed=config.allowed_targets)
    devices = mode.devices(env, kind=config.backend.device)
    open_devices(devices, precision=config.train.precision)

    with ExitStack() as stack:
        stack.enter_context(
            process_group(env, backend=config.backend, init_method=_init_method(job, env))
        )
        ensure_agreement(_comparable(job), optional=job.code)
        ensure_own_devices(devices, backend=config.backend.name)
        num_threads = config.train.num_threads or _num_threads(env)
        torch.set_num_threads(num_threads)
        marks = _marks(job, env)
        run = from_rank_zero(lambda: claim_run(job, marks=marks, stack=stack))
        if env.is_rank_zero:
            stack.enter_context(_failure_recorded(run.folder))
        job = replace(job, config=with_global_size(config, run.global_size, env.world_size))
        rank_log = stack.enter_context(RankLog(run.folder, env, hide=job.secrets.hide))
        if env.is_rank_zero:
            if not is_frozen(run.folder):
                freeze(job, run.folder)
            _record_start(
                *(job, env, run.folder),
                num_threads=num_threads,
                devices=devices,
                num_devices=mode.num_devices(env, kind=config.backend.device),
            )
        with job.secrets.hidden_in_errors():
            yield Session(job, env, mode, devices, run.folder, rank_log.write)


def _comparable(job: Job) -> dict[str, Any]:
    """Return the config's keys and values; those from the environment, not to be shown, as one."""
    values, shown = flatten(job.config), flatten(job.secrets.written(job.config))
    hidden = {key: value for key, value in values.items() if shown.get(key) != value}
    return {**shown, "the hash of what oc.env gives": digest(hidden)}


def note_restart(session: Session, *, step: int) -> None:
    """Say why the gang was restarted, if it was; give up when three attempts got no further.

    Args:
        session: of this rank.
        step: the one that this attempt goes on from.

    Raises:
        UserError: three attempts in a row began at the same step.
    """
    env, scratch = session.env, session.job.scratch
    if not env.restart_count or scratch is None:
        return
    causes = [cause(scratch, attempt=attempt) for attempt in range(env.restart_count)]
    allowed = session.config.launch.max_restarts
    session.log(f"restart {env.restart_count} of {allowed}: {_sentence(causes[-1])}")
    path = scratch / f"attempts-{env.rank}.json"
    steps = [*(json.loads(path.read_text()) if path.exists() else []), step]
    path.write_text(json.dumps(steps))
    if len(steps) >= 3 and len(set(steps[-3:])) == 1:
        raise UserError(
            f"three restarts in a row made no progress beyond step {step}, so that the cause is no "
            f"passing one; the first of them: {_sentence(causes[-3])}; see also logs/ in the run "
            "folder"
        )


def _sentence(failure: Failure | None) -> str:
    return failure.sentence if failure else "another machine's ranks have failed"


@contextmanager
def _failure_recorded(run_dir: Path) -> Iterator[None]:
    """Leave run.json saying failed if rank 0 is; a launcher of ours then says it more exactly."""
    try:
        yield
    except BaseException as error:
        kind = "user" if isinstance(error, UserError) else "crash"
        sentence = " ".join(str(error).split()) or type(error).__name__
        with suppress(UserError):  # a full disk: what it made fail is the error to tell
            write_run_record(
                run_dir,
                status=Status.FAILED,
                finished_at=time.time(),
                error={"rank": 0, "kind": kind, "sentence": sentence},
            )
        raise


def _num_threads(env: DistEnv) -> int:
    """Return the cores of this rank over the ranks that share them. Collective: every rank.

    A launcher that binds each rank to cores of its own has divided the machine already.
    """
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    place = (socket.gethostname(), mask)
    return max(1, detect().num_cores // gather_objects(place).count(place))


def _marks(job: Job, env: DistEnv) -> list[str]:
    """Return the marks of all ranks, by which their launch is known again. Collective."""
    own = own_marks(env, has_agent=job.scratch is not None)
    return sorted(set().union(*gather_objects(own)))


def _init_method(job: Job, env: DistEnv) -> str | None:
    """Return where the ranks meet."""
    asked, scratch = job.config.launch.init_method, job.scratch
    if scratch is None:
        return env.init_method if env.launcher == "torchrun" else asked or env.init_method
    if asked is None and env.num_nodes > 1:
        return env.init_method
    # A file needs no port, so that parallel sweeps can never meet on one. Each attempt has its own:
    # an earlier one's would keep the addresses of ranks that are gone.
    if asked is None or asked.startswith(INIT_FILE):
        name = (asked or "store").removeprefix(INIT_FILE)
        if env.num_nodes > 1:
            return asked
        suffix = f"{scratch.name}-{env.restart_count}"
        return f"{INIT_FILE}{Path(scratch, name).absolute()}.{suffix}"
    return asked


def _record_start(
    job: Job,
    env: DistEnv,
    run_dir: Path,
    *,
    num_threads: int,
    devices: tuple[torch.device, ...],
    num_devices: int,
) -> None:
    config = job.config
    begin_session(
        run_dir,
        started_at=job.started_at,
        status=Status.RUNNING,
        error=None,
        task=config.task,
        config_hash=config_hash(config),
        work_hash=work_hash(config),
        **job.code,
        host=socket.gethostname(),
        world_size=env.world_size,
        num_nodes=env.num_nodes,
        parallelism=config.parallelism.get("name"),
        backend=config.backend.name,
        devices=[str(device) for device in devices],
        num_devices=num_devices,
        num_threads=num_threads,
        restarts=env.restart_count,
        warnings=list(job.warnings),
    )
