"""The training task of one rank: the config becomes objects, the objects a run."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from ddp_runner.checkpoint.weights import starting_weights
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.instantiate import make
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Source
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.scratch import READY, ended_ranks
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_logger import NullLogger, RunLogger, keep_files
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.start_block import sizes, start_block
from ddp_runner.train.build import build_trainee
from ddp_runner.train.export import deliver, validate_monitor
from ddp_runner.train.first_batch import refuse_mean, try_first_batch, warnings_of
from ddp_runner.train.loop import Control, Position, train
from ddp_runner.train.roles import take_part
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.torch_errors import explained


def run_training(session: Session, stop_requested: Callable[[], bool]) -> str:
    """Build everything, go on from a checkpoint if there is one, and train; return the status.

    Collective: every rank must call.
    """
    config, env, run_dir, log = session.config, session.env, session.run_dir, session.log
    written = session.job.secrets.written(config)
    source = make("dataset", config.dataset, kind=Source, allowed=config.allowed_targets)
    dataset = load_dataset(source, data_root=Path(config.data_root), log=log)
    validate_monitor(config, dataset)
    weights = None
    if env.is_rank_zero:
        weights = starting_weights(config, run_dir / "checkpoints", log=log)
    trainee = build_trainee(
        config, env, mode=session.mode, devices=session.devices, dataset=dataset, weights=weights
    )
    trial = try_first_batch(trainee, config)
    refuse_mean(trial, config)
    position = Position()
    resume_step = restore(trainee, position, written, run_dir / "checkpoints", log=log)
    note_restart(session, step=position.step)
    if env.is_rank_zero:
        freeze(session.job, run_dir)  # only now: a resume that is refused leaves it as it was
    steps_per_epoch = trainee.batches.steps_per_epoch
    max_steps = position.last_step(config.train, steps_per_epoch=steps_per_epoch)

    if not env.is_rank_zero:  # whose start block says it
        log(f"rank {env.rank} is process {os.getpid()}")
    part = take_part(
        trainee,
        env,
        seed=config.seed,
        position=position,
        num_steps=max(0, max_steps - position.step),
        timeout_s=config.backend.timeout_s,
        ended=partial(ended_ranks, session.job.scratch),
        log=log,
    )
    if isinstance(part, str):
        return part
    trainee = part
    if session.job.scratch is not None:
        session.job.scratch.mkdir(parents=True, exist_ok=True)
        (session.job.scratch / READY).touch()

    logger: NullLogger | RunLogger = NullLogger()
    if env.is_rank_zero:
        model_sizes = sizes(trainee.module)
        write_run_record(run_dir, **model_sizes)
        found = [*session.job.warnings, *warnings_of(trial, trainee, config)]
        write_run_record(run_dir, warnings=found)
        warnings = [f"warning: {one}" for one in found]
        block = start_block(
            config,
            env,
            None if session.job.run_dir else run_dir,
            num_parameters=model_sizes["num_parameters"],
            dataset=dataset.name,
            num_train=len(dataset.train.inputs),
            num_eval=len(dataset.eval.inputs),
            num_shares=trainee.batches.num_shares,
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            devices=trainee.devices,
            versions=session.job.code["versions"],
        )
        keep_files(run_dir, dataset.files)
        lines = [*warnings, *dataset.notes, *([block] if session.job.shows_header else [])]
        if lines:
            log("\n".join(lines))
        logger = RunLogger(
            run_dir,
            started_at=session.job.started_at,
            max_steps=max_steps,
            total_epochs=position.epoch
            + math.ceil((max_steps - position.step + position.step_in_epoch) / steps_per_epoch),
            resume_step=resume_step,
            title=session.job.title,
        )

    writer = None
    if env.is_rank_zero:
        writer = CheckpointWriter(
            run_dir / "checkpoints",
            config.checkpoint,
            scratch=session.job.scratch,
            log=log,
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
    with logger:
        with writer or nullcontext(), explained(trainee.module):
            status = train(trainee, position=position, control=control, logger=logger)
        if trainee.gradients is not None:
            trainee.gradients.close(status)
            write_run_record(run_dir, lost_ranks=trainee.gradients.lost)
        if status == Status.COMPLETED:
            deliver(trainee, position, config, run_dir, logger=logger, log=log)
        logger.finish(status, step=position.step, epoch=position.epoch)
    return status
