"""The composition root of one rank: the only place where config becomes objects.

Called by ``launch`` inside each worker it started, and by ``__main__`` in a worker that torchrun,
Slurm or mpirun started.
"""

import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from ddp_runner.check.task import run_check
from ddp_runner.checkpoint.weights import starting_weights
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.collectives.task import run_collectives
from ddp_runner.config.instantiate import make
from ddp_runner.data.cache import load_dataset
from ddp_runner.dist_env import DistEnv, dist_env
from ddp_runner.job import EXIT_COMPLETED, READY, Job
from ddp_runner.rank.failures import ended_ranks
from ddp_runner.rank.session import Session, note_restart, open_session
from ddp_runner.rank.stop import StopRequest, die_with_launcher
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_logger import NullReporter, Reporter, keep_files, sizes, start_block
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.train.build import build_trainee
from ddp_runner.train.export import check_monitor, deliver
from ddp_runner.train.first_batch import refuse_mean, try_first_batch, warnings_of
from ddp_runner.train.loop import Control, Position, train
from ddp_runner.train.roles import take_part
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.torch_errors import explained


def work(job: Job) -> dict[str, Any]:
    """Run one rank of a group that ``launch`` started. The supervisor's entrypoint."""
    die_with_launcher()
    env = dist_env()
    assert env is not None
    return run(job, env)


def run_under_launcher(job: Job, env: DistEnv) -> NoReturn:
    """Run one rank that torchrun, Slurm or mpirun started, and end the process."""
    result = record(run)(job, env)
    status = result["status"] if result else "completed"
    received = (result or {}).get("signal") or signal.SIGTERM
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's own end, which now and then aborts under gloo's threads while
    # a peer's connection closes. Forked workers end like this, too.
    os._exit(EXIT_COMPLETED if status == "completed" else 128 + received)


def run(job: Job, env: DistEnv) -> dict[str, Any]:
    """Run the task as one rank of the gang; return status, run_dir and the signal that stopped it.

    Collective: every rank must call.

    Raises:
        UserError: the input is at fault: the data, a checkpoint, a loss that became NaN.
    """
    stop_requested = StopRequest(job.scratch, rank=env.rank, attempt=env.restart_count)
    with open_session(job, env) as session:
        status = TASKS[job.config.task](session, stop_requested)
    return {
        "status": status,
        "run_dir": str(session.run_dir),
        "signal": stop_requested.received,  # that this very rank has received
    }


def run_training(session: Session, stop_requested: Callable[[], bool]) -> str:
    """Build everything, go on from a checkpoint if there is one, and train; return the status.

    Collective: every rank must call.
    """
    config, env, run_dir, say = session.config, session.env, session.run_dir, session.say
    written = session.job.secrets.written(config)
    source = make("dataset", config.dataset, allowed=config.allowed_targets)
    dataset = load_dataset(source, data_root=Path(config.data_root), say=say)
    check_monitor(config, dataset)
    weights = None
    if env.is_rank_zero:
        weights = starting_weights(config, run_dir / "checkpoints", say=say)
    trainee = build_trainee(
        config, env, mode=session.mode, devices=session.devices, dataset=dataset, weights=weights
    )
    trial = try_first_batch(trainee, config)
    refuse_mean(trial, config)
    position = Position()
    resume_step = restore(trainee, position, written, run_dir / "checkpoints", say=say)
    note_restart(session, step=position.step)
    if env.is_rank_zero:
        freeze(session.job, run_dir)  # only now: a resume that is refused leaves it as it was
    steps_per_epoch = trainee.batches.steps_per_epoch
    max_steps = position.last_step(config.train, steps_per_epoch=steps_per_epoch)

    if not env.is_rank_zero:  # whose start block says it
        say(f"rank {env.rank} is process {os.getpid()}")
    part = take_part(
        trainee,
        env,
        seed=config.seed,
        position=position,
        num_steps=max(0, max_steps - position.step),
        timeout_s=config.backend.timeout_s,
        ended=partial(ended_ranks, session.job.scratch),
        say=say,
    )
    if isinstance(part, str):
        return part
    trainee = part
    if session.job.scratch is not None:
        session.job.scratch.mkdir(parents=True, exist_ok=True)
        (session.job.scratch / READY).touch()

    reporter = NullReporter()
    if env.is_rank_zero:
        write_run_record(run_dir, **sizes(trainee.module))
        found = [*session.job.warnings, *warnings_of(trial, trainee, config)]
        write_run_record(run_dir, warnings=found)
        warnings = [f"warning: {one}" for one in found]
        block = start_block(
            config, trainee, env, run_dir, max_steps=max_steps, code=session.job.code
        )
        keep_files(run_dir, dataset.files)
        say("\n".join([*warnings, *dataset.notes, block]))
        reporter = Reporter(
            run_dir,
            started_at=session.job.started_at,
            max_steps=max_steps,
            total_epochs=position.epoch
            + math.ceil((max_steps - position.step + position.step_in_epoch) / steps_per_epoch),
            resume_step=resume_step,
        )

    writer = None
    if env.is_rank_zero:
        writer = CheckpointWriter(
            run_dir / "checkpoints",
            config.checkpoint,
            scratch=session.job.scratch,
            say=say,
            pinned=session.devices[0].type == "cuda",
        )
        if resume_step is not None:
            writer.retain(step=resume_step)

    def save(position: Position, metrics: dict[str, float]) -> None:
        state = snapshot(trainee, position, written)
        if writer is not None:
            writer.save(state, step=position.step, metrics=metrics)

    control = Control(
        max_steps=max_steps,
        save_every_steps=config.checkpoint.every_steps,
        save_every_epochs=config.checkpoint.every_epochs,
        save=save,
        stop_requested=stop_requested,
    )
    with reporter:
        with writer or nullcontext(), explained(trainee.module):
            status = train(trainee, position=position, control=control, reporter=reporter)
        if trainee.gradients is not None:
            trainee.gradients.close(status)
            write_run_record(run_dir, lost_ranks=trainee.gradients.lost)
        if status == "completed":
            deliver(trainee, position, config, run_dir, reporter=reporter, say=say)
        reporter.finish(status, position)
    return status


# Each takes the session and whether to stop, and returns completed or preempted.
TASKS: dict[str, Callable[[Session, Callable[[], bool]], str]] = {
    "train": run_training,
    "collectives": run_collectives,
    "check": run_check,
}
