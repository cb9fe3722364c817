"""The composition root of one rank: the only place where config becomes objects.

Called by ``launch`` inside each worker it started, and by ``__main__`` in a worker that torchrun,
Slurm or mpirun started.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_runner.build import build_trainee, make
from ddp_runner.checkpoint import save_checkpoint
from ddp_runner.config import check_targets, config_hash, flatten
from ddp_runner.data.prepared import load_dataset
from ddp_runner.distributed import broadcast_object, check_agreement, process_group
from ddp_runner.environment import DistEnv, dist_env
from ddp_runner.errors import UserError
from ddp_runner.failures import first_failure, record_failure
from ddp_runner.folders import claim, freeze_config, previous_attempt, run_folder
from ddp_runner.hardware import detect
from ddp_runner.job import EXIT_COMPLETED, Job
from ddp_runner.logs import RankLog
from ddp_runner.parallelism import Mode
from ddp_runner.record import write_run_record
from ddp_runner.report import NullReporter, Reporter, start_block
from ddp_runner.state import restore, snapshot
from ddp_runner.stop import StopRequest, die_with_launcher
from ddp_runner.train import Control, Position, train

PEER_GRACE_S = 2.0  # a rank that lost a peer waits: the peer's own end shall be noticed first


def work(job: Job) -> dict[str, Any]:
    """Run one rank of a gang that ``launch`` started. The elastic agent's entrypoint."""
    die_with_launcher()
    env = dist_env()
    assert env is not None
    assert job.scratch is not None
    try:
        return run(job, env)
    except Exception as error:
        failure = record_failure(job.scratch, rank=env.rank, attempt=env.restart_count, error=error)
        if failure.kind == "peer":
            time.sleep(PEER_GRACE_S)
        raise


def run_under_launcher(job: Job, env: DistEnv) -> NoReturn:
    """Run one rank that torchrun, Slurm or mpirun started, and end the process."""
    result = record(run)(job, env)
    status = result["status"] if result else "completed"
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's own end, which now and then aborts under gloo's threads while
    # a peer's connection closes. Forked workers end like this, too.
    os._exit(EXIT_COMPLETED if status == "completed" else 128 + signal.SIGTERM)


def run(job: Job, env: DistEnv) -> dict[str, Any]:
    """Train as one rank of the gang; return status and run_dir. Collective: every rank must call.

    Raises:
        UserError: the input is at fault: the data, a checkpoint, a loss that became NaN.
    """
    config = job.config
    check_targets(config)  # again: a config may have come with a run that somebody else made
    stop_requested = StopRequest(job.scratch, rank=env.rank, attempt=env.restart_count)
    num_threads = config.train.num_threads or max(1, detect().num_cores // env.local_world_size)
    torch.set_num_threads(num_threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    mode: Mode = make("parallelism", config.parallelism)
    devices = mode.devices(env, kind=config.backend.device)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])

    with ExitStack() as stack:
        stack.enter_context(
            process_group(env, backend=config.backend, init_method=_init_method(job, env))
        )
        check_agreement({**flatten(config), **job.code})
        run_dir = broadcast_object(_open_run(job, env) if env.is_rank_zero else None)
        assert run_dir is not None
        log = stack.enter_context(RankLog(run_dir, env))
        source = make("dataset", config.dataset)
        dataset = load_dataset(source, data_root=Path(config.data_root), say=log.say)
        trainee = build_trainee(config, env, mode=mode, devices=devices, dataset=dataset)
        position = Position()
        resume_step = restore(trainee, position, config, run_dir / "checkpoints", say=log.say)
        if env.restart_count and job.scratch is not None:
            before = first_failure(job.scratch, attempt=env.restart_count - 1)
            reason = before.sentence if before else "a rank was killed"
            log.say(f"restart {env.restart_count} of {config.launch.max_restarts}: {reason}")
            _check_progress(job.scratch, env, position)
        max_steps = config.train.max_steps or config.train.epochs * trainee.batches.steps_per_epoch

        reporter = NullReporter()
        if env.is_rank_zero:
            stack.enter_context(_failure_recorded(run_dir))
            _record_start(job, env, run_dir, num_threads=num_threads, devices=devices)
            block = start_block(config, trainee, run_dir, max_steps=max_steps, code=job.code)
            log.say("\n".join([*(f"warning: {one}" for one in job.warnings), block]))
            reporter = Reporter(
                run_dir,
                started_at=job.started_at,
                max_steps=max_steps,
                steps_per_epoch=trainee.batches.steps_per_epoch,
                resume_step=resume_step,
            )

        def save(position: Position, metrics: dict[str, float]) -> None:
            state = snapshot(trainee, position, config)
            if env.is_rank_zero:
                save_checkpoint(
                    run_dir / "checkpoints",
                    state,
                    step=position.step,
                    metrics=metrics,
                    keep=config.checkpoint.keep,
                    monitor=config.checkpoint.monitor,
                    mode=config.checkpoint.mode,
                    say=log.say,
                )

        control = Control(
            max_steps=max_steps,
            save_every_steps=config.checkpoint.every_steps,
            save_every_epochs=config.checkpoint.every_epochs,
            save=save,
            stop_requested=stop_requested,
        )
        status = train(trainee, position=position, control=control, reporter=reporter)
        reporter.finish(status, position)
    return {"status": status, "run_dir": str(run_dir)}


@contextmanager
def _failure_recorded(run_dir: Path) -> Iterator[None]:
    """Leave run.json saying failed if rank 0 is; a launcher of ours then says it more exactly."""
    try:
        yield
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "crash"
        sentence = " ".join(str(error).split())
        write_run_record(
            run_dir,
            status="failed",
            finished_at=time.time(),
            error={"rank": 0, "kind": kind, "sentence": sentence},
        )
        raise


def _init_method(job: Job, env: DistEnv) -> str | None:
    if job.config.launch.init_method is not None or job.scratch is None or env.num_nodes > 1:
        return job.config.launch.init_method
    # A file needs no port, so that the gangs of parallel sweeps can never meet on one.
    return (job.scratch / f"store-{env.restart_count}").as_uri()


def _open_run(job: Job, env: DistEnv) -> Path:
    """Return the run folder, on rank 0; claimed here where no launcher of ours has done it."""
    if job.scratch is not None and job.run_dir is not None:
        return job.run_dir
    planned = job.run_dir or run_folder(job.config)
    if env.restart_count and job.run_dir is None:
        run_dir = previous_attempt(planned, config_hash(job.config)) or claim(planned)
    else:
        run_dir = job.run_dir or claim(planned)
    run_dir.mkdir(parents=True, exist_ok=True)
    freeze_config(run_dir, job.config, overrides=job.overrides, raw=job.raw_config)
    return run_dir


def _record_start(
    job: Job, env: DistEnv, run_dir: Path, *, num_threads: int, devices: tuple[torch.device, ...]
) -> None:
    config = job.config
    write_run_record(
        run_dir,
        status="running",
        error=None,
        config_hash=config_hash(config),
        **job.code,
        host=socket.gethostname(),
        world_size=env.world_size,
        num_nodes=env.num_nodes,
        parallelism=config.parallelism.get("name"),
        backend=config.backend.name,
        devices=[str(device) for device in devices],
        num_threads=num_threads,
        restarts=env.restart_count,
        warnings=list(job.warnings),
        started_at=job.started_at,
        finished_at=None,
        wall_s=None,
        startup_s=None,
    )


def _check_progress(scratch: Path, env: DistEnv, position: Position) -> None:
    """Give up when three attempts in a row began at the same step. Collective: every rank.

    Raises:
        UserError: they did.
    """
    path = scratch / f"attempts-{env.rank}.json"
    steps = [*(json.loads(path.read_text()) if path.exists() else []), position.step]
    path.write_text(json.dumps(steps))
    if len(steps) >= 3 and len(set(steps[-3:])) == 1:
        raise UserError(
            f"three restarts in a row made no progress beyond step {position.step}: the cause is "
            "not a passing one; see the first failure above, or logs/ in the run folder"
        )
