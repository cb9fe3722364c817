"""The training task of a rank: builds everything from the config, trains, and exports the model."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.monitors import validate_known
from ddp_runner.errors import UserError, counted
from ddp_runner.job import Status
from ddp_runner.profiling.profiler import AnyProfiler, NullProfiler, Profiler, has_steps_to_trace
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.rank.task_log import log_start, task_logger
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.heartbeat import ENDING
from ddp_runner.tracking.run_dir import RunDir, keep_files
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import RunFields, add_warning, write_run_record
from ddp_runner.tracking.start_block import sizes, training_facts
from ddp_runner.train.buffers import find_changing
from ddp_runner.train.build import build_session_state
from ddp_runner.train.engine import engage
from ddp_runner.train.export import export_best
from ddp_runner.train.first_batch import try_evaluation, try_first_batch, warnings_of
from ddp_runner.train.loop import train
from ddp_runner.train.progress import early_stop_of, stop_reason
from ddp_runner.train.same_data import agreed_samples
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.state import TrainState


def run_training(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Build, resume from the run's newest checkpoint if it has any, train, and export the model.

    Collective: every rank must call.
    """
    config, run_dir, wire = session.config, session.run_dir, session.job.wire
    state = build_session_state(session, config)
    state.samples, trial = agreed_samples(state.work.dataset), try_first_batch(state)
    state.scalars = trial.scalars
    warnings = warnings_of(trial, state)
    find_changing(state)
    known = try_evaluation(state)
    validate_known(config, known)
    resume_step = restore(state, run_dir.checkpoints, log=session.log)
    note_restart(session, step=state.step)
    if resume_step is not None and state.is_done:
        key = "epochs" if config.train.max_steps is None else "max_steps"
        done = f"{counted(resume_step, 'step')} and {counted(state.batches.epoch, 'epoch')}"
        asked = getattr(config.train, key)
        session.log(f"nothing is left to train: {done} are done, and train.{key} is {asked}")
    if session.env.is_rank_zero:
        freeze(session.job, run_dir)  # only now, so that a failed resume changes nothing
    else:  # rank 0 logs it with the facts of the run
        session.log(f"rank {session.env.rank} is process {os.getpid()}")
    served = engage(state)
    if served is not None:
        return served
    if wire is not None:
        wire.ready()
    session_logger = _logger(
        session, state, warnings, directions=known.directions, resume_step=resume_step
    )
    # Its warnings come after those of the logger, in run.json as well.
    profiler = _profiler(session, state, run_dir)
    state.profiler = profiler
    with session_logger as logger:
        with profiler, _writer(session, resume_step=resume_step) as writer:

            def save() -> None:
                if writer is not None:
                    writer.wait()  # so that only one state is in memory
                copies, metrics = set[int](), dict(state.progress.metrics)
                content = snapshot(state, copies=copies)
                if writer is not None:
                    writer.save(content, step=state.step, metrics=metrics, copies=copies)

            status = train(state, save=save, stop_requested=stop_requested, logger=logger)
            session.heartbeat.note(ENDING)  # the last checkpoint may take a while
        state.engine.close(status)
        if status == Status.COMPLETED:
            export_best(state, run_dir, logger=logger, log=session.log)
        early_stop = early_stop_of(config.early_stop, state.work.metrics)
        reason = stop_reason(state.progress, early_stop)
        if reason is not None and session.env.is_rank_zero:
            session.log(reason)
        fields = RunFields(step=state.step, epoch=state.batches.epoch, stopped_early=reason)
        logger.finish(status, **(fields | state.measured))
    return status


def _profiler(session: Session, state: TrainState, run_dir: RunDir) -> AnyProfiler:
    """Return what traces the steps of ``train.profile``."""
    asked, done = session.config.train.profile, state.step
    folder = run_dir.path / "profile"
    warn = partial(_warn, session)
    if not has_steps_to_trace(asked, done=done, folder=folder, warn=warn):
        return NullProfiler()
    return Profiler(
        asked,
        done=done,
        device=session.devices[0],
        folder=folder,
        restart_timer=state.timer.forget,
        log=session.log,
        warn=warn,
    )


def _warn(session: Session, text: str) -> None:
    """Warn on the terminal, in this rank's log and, from rank 0, in run.json."""
    session.log(f"warning: {text}")
    if session.env.is_rank_zero:
        with suppress(UserError):  # a full disk, which the run itself reports
            add_warning(session.run_dir, text)


def _logger(
    session: Session,
    state: TrainState,
    warnings: Sequence[str],
    *,
    directions: Mapping[str, str],
    resume_step: int | None,
) -> Logger:
    """Return what this rank logs to, with the facts of the run logged already."""
    run_dir, work, max_steps = session.run_dir, state.work, state.last_step
    if not session.env.is_rank_zero:
        return task_logger(session)
    model_sizes = sizes(state.module)
    is_stream = state.batches.steps_per_epoch is None
    fields = RunFields(
        warnings=[*session.job.warnings, *warnings],
        directions=directions,
        trains_on_stream=is_stream,
        model_arguments=work.dataset.model_arguments,
    )
    write_run_record(run_dir, **(model_sizes | fields))
    keep_files(run_dir.path, work.dataset.files)
    facts = training_facts(
        session.config,
        session.env,
        num_parameters=model_sizes["num_parameters"],
        num_trained=sum(one.numel() for one in state.module.parameters() if one.requires_grad),
        dataset=work.dataset.name,
        num_train=work.dataset.train.num_samples,
        num_eval=work.dataset.eval.num_samples,
        num_shares=state.batches.num_shares,
        max_steps=max_steps,
        steps_per_epoch=state.batches.steps_per_epoch,
        devices=work.devices,
    )
    notes = [*(f"warning: {text}" for text in warnings), *work.dataset.notes]
    log_start(session, facts, notes=notes, explains=True)
    return task_logger(
        session,
        max_steps=max_steps or 0,
        total_epochs=state.total_epochs or 0,
        resume_step=resume_step,
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
        wire=session.job.wire,
        log=session.log,
    )
    if resume_step is not None:
        writer.retain(step=resume_step)
    return writer
