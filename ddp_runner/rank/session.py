"""A rank's session, for every task: process group, run folder, log and start of run.json."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddp_runner.config.identity import config_hash, digest, flatten, work_hash
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config, RunConfig, mode_needs
from ddp_runner.config.targets import validate_targets
from ddp_runner.device import open_devices
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import (
    ensure_agreement,
    ensure_own_devices,
    from_rank_zero,
    gather_objects,
)
from ddp_runner.errors import UserError, one_line, os_errors
from ddp_runner.files import replace_file
from ddp_runner.host.hardware import usable_cores
from ddp_runner.host.memory import keep_freed_memory
from ddp_runner.job import FailureKind, Job, Status
from ddp_runner.parallelism.mode import Mode, count_devices, rank_devices
from ddp_runner.parallelism.virtual_ranks import with_virtual_ranks
from ddp_runner.rank.adopt import with_config_of_rank_zero
from ddp_runner.rank.process_group import process_group
from ddp_runner.rank.rank_log import rank_log
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.alive import Heartbeat
from ddp_runner.tracking.git import code_version
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_folder_claim import (
    claim_run,
    own_launch_ids,
    prepare_run_folder,
    with_run_folder,
)
from ddp_runner.tracking.run_record import (
    RunError,
    RunFields,
    add_changes,
    fail_session,
    has_taken_step,
    read_run_record,
    start_session,
)
from ddp_runner.tracking.trackers.start_trackers import followed

INIT_FILE = "file://"  # prefix of a launch.init_method that names a file


@dataclass(frozen=True)
class Session:
    """A rank's view of an open run."""

    job: Job
    env: DistEnv
    mode: Mode
    devices: tuple[torch.device, ...]  # this rank's devices
    run_dir: RunDir
    log: Callable[[str], None]  # writes to this rank's log; rank 0 also prints
    heartbeat: Heartbeat = field(default_factory=Heartbeat)  # beats on rank 0
    hosts: tuple[str, ...] = ()  # distinct hosts of all ranks
    hosts_without_folder: Sequence[str] = ()  # that do not see the run folder

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.job.config


@contextmanager
def open_session(job: Job, env: DistEnv) -> Iterator[Session]:
    """Set up this rank's process and join the others. Collective: every rank must call.

    Raises:
        UserError: a target is not allowed, the ranks have different configs, or the run folder
            holds another run.
    """
    mode, devices = _open_mode(job.config, env)
    with ExitStack() as stack:
        group = process_group(env, backend=job.config.backend, init_method=_init_method(job, env))
        stack.enter_context(group)
        if env.num_nodes > 1 and (adopted := with_config_of_rank_zero(job)) is not job:
            job = adopted
            mode, devices = _open_mode(job.config, env)
        config = job.config
        ensure_agreement(_comparable(job), optional=job.provenance)
        ensure_own_devices(devices, backend=config.backend.name)
        torch.set_num_threads(config.train.num_threads or _num_threads())
        keep_freed_memory()
        own_ids = own_launch_ids(env, has_agent=job.wire is not None)
        launch_ids = sorted(set().union(*gather_objects(own_ids)))
        run_dir, size = from_rank_zero(lambda: _claim(job, launch_ids=launch_ids, held=stack))
        if job.wire is not None and env.local_rank == 0:
            job.wire.send("claimed", run_dir.path)
        heartbeat = Heartbeat()
        if env.is_rank_zero:
            beating = heartbeat.beating(run_dir.heartbeat, started_at=job.started_at)
            stack.enter_context(beating)
            if job.wire is None:
                stack.enter_context(followed(job, run_dir))
            if not job.is_claimed:
                stack.enter_context(_failure_recorded(run_dir, started_at=job.started_at))
        job = with_run_folder(job, run_dir, size)
        open_log = rank_log(run_dir, env, hide=job.secrets.hide, prefix=job.line_prefix)
        log = stack.enter_context(open_log)
        # After a file was made in the folder: a file system of the network then looks for the rest.
        machines = gather_objects((socket.gethostname(), run_dir.record.exists()))
        hosts = tuple(dict.fromkeys(host for host, _ in machines))
        lacking = sorted({host for host, has_folder in machines if not has_folder})
        if lacking and env.is_rank_zero:
            log(
                f"{hosts[0]} keeps the run: {', '.join(lacking)} does not see its folder, and "
                "keeps only the logs of its own ranks"
            )
        session = Session(job, env, mode, devices, run_dir, log, heartbeat, hosts, lacking)
        if env.is_rank_zero and not has_taken_step(read_run_record(run_dir)):
            _record_start(session)
        with job.secrets.hidden_in_errors():
            yield session


def make_mode(config: Config) -> Mode:
    """Return the mode of parallelism that a config names."""
    mode: Mode = make("parallelism", config.parallelism, kind=Mode, allowed=config.allowed_targets)
    return mode


def _open_mode(config: RunConfig, env: DistEnv) -> tuple[Mode, tuple[torch.device, ...]]:
    """Return the config's mode and this rank's devices, ready to compute."""
    seed_all(config.seed)  # before any import or constructor that draws random numbers
    validate_targets(config)  # again: rank 0 may have sent the config of somebody else's run
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    mode = with_virtual_ranks(make_mode(config), config.batch.virtual_ranks)
    per_rank = mode_needs(config.parallelism).devices_per_rank
    devices = rank_devices(env, kind=config.backend.device, per_rank=per_rank)
    open_devices(devices, precision=config.train.precision)
    return mode, devices


def _comparable(job: Job) -> dict[str, Any]:
    """Return the config's keys and values, with a single hash for all secrets."""
    values, shown = flatten(job.config), flatten(job.secrets.written(job.config))
    hidden = {key: value for key, value in values.items() if shown.get(key) != value}
    shown["train.profile"] = job.config.train.profile  # all ranks must skip the same slow steps
    return {**shown, "the hash of values from oc.env": digest(hidden)}


def report_start(session: Session, *, step: int) -> None:
    """Record that the state is restored; after a restart, log its cause. Every rank must call.

    Until this call, a resumed run is unchanged.

    Raises:
        UserError: three restarts in a row began at the same step.
    """
    earlier, wire = session.job.earlier, session.job.wire
    if wire is not None:
        wire.send("began", step)
    if session.env.is_rank_zero:
        run_dir, before = session.run_dir, read_run_record(session.run_dir, missing_ok=True)
        _record_start(session)
        old, new = code_version(before), code_version(read_run_record(run_dir))
        is_known = "unknown" not in (old, new)
        if has_taken_step(before) and is_known and old != new:
            add_changes(run_dir, [f"code={new} (was {old})"], step=step)
    if not earlier:
        return
    count, limit = session.env.restart_count, session.config.launch.max_restarts
    causes = [cause for _, cause in earlier]
    session.log(f"restart {count} of {limit}: {causes[-1]}")
    steps = [*(first_step for first_step, _ in earlier), step]
    last_starts = [n for n in range(1, len(steps)) if steps[n] is not None][-3:]
    if len(last_starts) == 3 and len({steps[n] for n in last_starts}) == 1:
        raise UserError(
            f"three restarts in a row made no progress beyond step {step}, so the cause will not "
            f"go away. The first failed because {causes[last_starts[0] - 1]}",
            "see also logs/ in the run folder",
        )


def _claim(job: Job, *, launch_ids: Sequence[str], held: ExitStack) -> tuple[RunDir, int | None]:
    """Claim the run folder on rank 0, unless its launcher has; see ``claim_run``."""
    if job.is_claimed:
        assert job.run_dir is not None
        return RunDir(job.run_dir), None
    run_dir, global_size = claim_run(job, launch_ids=launch_ids, held=held)
    prepare_run_folder(with_run_folder(job, run_dir, global_size))
    return run_dir, global_size


@contextmanager
def _failure_recorded(run_dir: RunDir, *, started_at: float) -> Iterator[None]:
    """Mark the run as failed if rank 0 fails."""
    try:
        yield
    except BaseException as error:
        kind: FailureKind = "user" if isinstance(error, UserError) else "crash"
        with suppress(UserError):  # a full disk, which also caused the error
            run_error = RunError(rank=0, kind=kind, sentence=one_line(error))
            fail_session(run_dir, started_at=started_at, error=run_error)
        raise


def _num_threads() -> int:
    """Return this rank's cores divided by the ranks that share them. Collective: every rank.

    Some launchers bind each rank to its own cores; then no other rank shares them.
    """
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = (socket.gethostname(), mask)
    return max(1, usable_cores() // gather_objects(cores).count(cores))


def _init_method(job: Job, env: DistEnv) -> str | None:
    """Return where the ranks meet."""
    configured = job.config.launch.init_method
    if job.temp is None:
        return env.init_method if env.launcher == "torchrun" else configured or env.init_method
    if env.num_nodes > 1:
        return configured or env.init_method
    # A file needs no port, so parallel sweeps never meet at the same address.
    method = configured or f"{INIT_FILE}store"
    if not method.startswith(INIT_FILE):
        return method
    # A new file for each attempt: the old file holds addresses of ranks that are gone.
    path = Path(job.temp, method.removeprefix(INIT_FILE)).absolute()
    return f"{INIT_FILE}{path}.{job.temp.name}-{env.restart_count}"


def _keep_changes(session: Session) -> str | None:
    """Write the uncommitted changes in the code into the run folder; return the file's name.

    The name follows from the content, so a resume with other code replaces no earlier file.
    """
    text = session.job.secrets.hide(session.job.uncommitted)
    if not text:
        return None
    name = f"code-{digest(text)}.diff"
    path = session.run_dir.path / name
    with os_errors(f"{path} cannot be written"):
        replace_file(path, text.encode(errors="surrogateescape"))
    return name


def _record_start(session: Session) -> None:
    config, env, job = session.config, session.env, session.job
    written, slot, share = job.secrets.written(config), job.slot, RunFields()
    if slot is not None:  # a later resume outside of the sweep keeps these fields
        share = RunFields(parallel_jobs=True, cores=slot.cores, visible_gpus=slot.gpus)
    facts = RunFields(
        status=Status.RUNNING,
        error=None,
        task=config.task,
        sweep=session.run_dir.path.absolute().parent.name if job.title else None,
        tags=written.tags,
        notes=written.notes,
        config_hash=config_hash(config),
        work_hash=work_hash(config),
        own_groups=job.own_groups,
        host=socket.gethostname(),
        hosts=session.hosts,
        world_size=config.world_size,
        num_nodes=env.num_nodes,
        parallelism=config.parallelism.get("name"),
        backend=config.backend.name,
        devices=[str(device) for device in session.devices],
        num_devices=count_devices(
            env, session.devices, data_parallel=mode_needs(config.parallelism).data_parallel
        ),
        num_threads=torch.get_num_threads(),
        code_diff=_keep_changes(session),
        restarts=env.restart_count,
        warnings=list(job.warnings),
    )
    start_session(session.run_dir, started_at=job.started_at, **job.provenance, **(facts | share))
