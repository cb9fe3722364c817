"""The training task of a rank: builds everything from the config, trains, and exports the model."""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.job import Status
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_logger import Logger, NullLogger, RunLogger, keep_files
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.start_block import sizes, start_block, word_lines
from ddp_runner.train.build import build_session_state, validate_monitor
from ddp_runner.train.export import export_best
from ddp_runner.train.first_batch import Trial, try_first_batch, validate_loss, warnings_of
from ddp_runner.train.gradients import duties_of
from ddp_runner.train.loop import Control, train
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.state import TrainState
from ddp_runner.train.torch_errors import explained


def run_training(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Build, resume from the run's newest checkpoint if it has any, train, and export the model.

    Collective: every rank must call.
    """
    config, run_dir = session.config, session.run_dir
    state = build_session_state(session, config)
    validate_monitor("checkpoint", config.checkpoint.monitor, state.setup.dataset)
    trial = try_first_batch(state, config)
    validate_loss(trial, config)
    written = session.job.secrets.written(config)
    resume_step = restore(state, written, run_dir.checkpoints, log=session.log)
    note_restart(session, step=state.position.step)
    if session.env.is_rank_zero:
        freeze(session.job, run_dir)  # only now, so that a failed resume changes nothing
    steps_per_epoch = state.setup.batches.steps_per_epoch
    max_steps = state.position.last_step(config.train, steps_per_epoch=steps_per_epoch)

    if not session.env.is_rank_zero:  # rank 0 logs it with the facts of the run
        session.log(f"rank {session.env.rank} is process {os.getpid()}")
    role = session.mode.role(session.env)
    duties = duties_of(
        state,
        max_steps=max_steps,
        seed=config.seed,
        timeout_s=config.backend.timeout_s,
        ended=session.job.scratch.ended_ranks if session.job.scratch else set,
        log=session.log,
    )
    if role.serve is not None:  # this rank computes gradients for the ranks of the loop
        return role.serve(duties)
    if role.gradients is not None:
        state.gradients = role.gradients(duties)
    if session.job.scratch is not None:
        session.job.scratch.begin_loop()

    with _logger(session, state, trial, max_steps=max_steps, resume_step=resume_step) as logger:
        with _writer(session, resume_step=resume_step) as writer, explained(state.module):

            def save(state: TrainState) -> None:
                content, position = snapshot(state, written), state.position
                if writer is not None:
                    writer.save(content, step=position.step, metrics=dict(position.metrics))

            control = Control(
                max_steps=max_steps,
                save_every_steps=config.checkpoint.every_steps,
                save_every_epochs=config.checkpoint.every_epochs,
                save=save,
                stop_requested=stop_requested,
            )
            status = train(state, control=control, logger=logger)
        state.gradients.close(status)
        if status == Status.COMPLETED:
            export_best(state, config, run_dir, logger=logger, log=session.log)
        if session.env.is_rank_zero:
            write_run_record(run_dir, lost_ranks=list(state.gradients.lost))
        logger.finish(status, step=state.position.step, epoch=state.position.epoch)
    return status


def _logger(
    session: Session, state: TrainState, trial: Trial, *, max_steps: int, resume_step: int | None
) -> Logger:
    """Return what this rank logs to, with the facts of the run logged already."""
    config, env, run_dir, position = session.config, session.env, session.run_dir, state.position
    if not env.is_rank_zero:
        return NullLogger()
    warnings = [*session.job.warnings, *warnings_of(trial, state, config)]
    model_sizes, setup = sizes(state.module), state.setup
    write_run_record(run_dir, **(model_sizes | {"warnings": warnings}))
    keep_files(run_dir.path, setup.dataset.files)
    lines = [*(f"warning: {text}" for text in warnings), *setup.dataset.notes]
    if lines:
        session.log("\n".join(lines))
    block = start_block(
        config,
        env,
        None if session.job.run_dir else run_dir.path,
        num_parameters=model_sizes["num_parameters"],
        dataset=setup.dataset.name,
        num_train=len(setup.dataset.train.inputs),
        num_eval=len(setup.dataset.eval.inputs),
        num_shares=setup.batches.num_shares,
        max_steps=max_steps,
        steps_per_epoch=setup.batches.steps_per_epoch,
        devices=setup.devices,
    )
    versions = session.job.code["versions"]
    words = word_lines(config, env, device=setup.devices[0], versions=versions)
    # The log has both, of each job of a sweep.
    shows_header = session.job.shows_header
    (session.log if shows_header else log_to_file)(block)
    (session.log if shows_header and config.verbose else log_to_file)(words)
    steps_left = max_steps - position.step + position.step_in_epoch
    return RunLogger(
        run_dir,
        started_at=session.job.started_at,
        max_steps=max_steps,
        total_epochs=position.epoch + math.ceil(steps_left / setup.batches.steps_per_epoch),
        resume_step=resume_step,
        title=session.job.title,
    )


def _writer(
    session: Session, *, resume_step: int | None
) -> AbstractContextManager[CheckpointWriter | None]:
    """Return the checkpoint writer on rank 0, None on the other ranks."""
    if not session.env.is_rank_zero:
        return nullcontext()
    writer = CheckpointWriter(
        session.run_dir.checkpoints,
        session.config.checkpoint,
        scratch=session.job.scratch,
        log=session.log,
        pinned=session.devices[0].type == "cuda",
    )
    if resume_step is not None:
        writer.retain(step=resume_step)
    return writer
