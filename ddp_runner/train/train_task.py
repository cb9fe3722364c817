"""The training task of a rank: builds all objects of the config, trains, and exports the model."""

import os
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from functools import partial

from torch import nn

from ddp_runner.checkpoint.between_ranks import weights_sha256
from ddp_runner.config.identity import is_inside
from ddp_runner.config.load import chosen_keys
from ddp_runner.config.schema import mode_needs
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import from_rank_zero
from ddp_runner.errors import UserError, counted, in_yaml, listed
from ddp_runner.job import Status
from ddp_runner.parallelism.stages import whole_parameters
from ddp_runner.rank.records import Records, log_facts
from ddp_runner.rank.session import Session, report_start
from ddp_runner.tracking.alive import ENDING
from ddp_runner.tracking.run_dir import RunDir, keep_files
from ddp_runner.tracking.run_folder_claim import changed_values
from ddp_runner.tracking.run_record import RunFields, add_changes, add_warning
from ddp_runner.tracking.start_block import count_of, placement
from ddp_runner.train.best_model import export_best
from ddp_runner.train.build_state import build_session_state
from ddp_runner.train.first_batch import try_run
from ddp_runner.train.loop import build_engine, train
from ddp_runner.train.profiler import Profiler, has_steps_to_trace
from ddp_runner.train.progress import stop_reason
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.state import TrainState

# Keys that affect what a run learns; those of LENGTH set only how long it trains.
LEARNING = (
    *("seed", "model", "parallelism", "optimizer", "scheduler", "params", "ema", "train"),
    "batch.virtual_ranks",
)
LENGTH = ("train.max_steps", "train.epochs")


def run_training(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Build the state, resume from the newest checkpoint if any, train, and export the model.

    Collective: every rank must call.
    """
    config, run_dir = session.config, session.run_dir
    state = build_session_state(session, config)
    metrics, warnings = try_run(state)
    resume_step = restore(state, run_dir.checkpoints, log=session.log)
    changes = [] if resume_step is None else _changes(session, state)
    report_start(session, step=state.step)
    if changes:
        session.log(f"this resume changes {listed(changes)}")
    if resume_step is not None and state.is_done:
        key, _, limit = _limit(state)
        done = f"{counted(resume_step, 'step')} and {counted(state.batches.epoch, 'epoch')}"
        session.log(f"nothing is left to train: {done} are done, and {key} is {limit}")
    if not session.env.is_rank_zero:  # rank 0 logs its process with the facts of the run
        session.log(f"rank {session.env.rank} is process {os.getpid()}")
    state.engine = build_engine(state)
    status = state.engine.serve(state)
    if status is not None:  # this rank has served the loop of another
        return status
    parameters = {*whole_parameters(state.module).values()}
    if session.env.is_rank_zero:
        facts = training_facts(session.env, state, parameters)
        notes = [*(f"warning: {text}" for text in warnings), *state.work.dataset.notes]
        log_facts(session, facts, notes=notes, explains=True)
    fields = RunFields(
        warnings=[*session.job.warnings, *warnings],
        directions=metrics.directions,
        trains_on_stream=state.batches.steps_per_epoch is None,
        model_arguments=state.work.dataset.model_arguments,
        num_parameters=sum(value.numel() for value in parameters),
        gradient_bytes=sum(value.nbytes for value in parameters if value.requires_grad),
    )
    with ExitStack() as stack:
        records = Records(
            session,
            fields=fields,
            resume_step=resume_step,
            stack=stack,
            max_steps=state.final_step or 0,
            total_epochs=state.total_epochs or 0,
        )
        if session.env.is_rank_zero:
            if changes:
                add_changes(run_dir, changes, step=state.step)
            keep_files(run_dir.path, state.work.dataset.files)

        def save() -> None:
            content = partial(snapshot, state)
            records.save(content, step=state.step, metrics=state.progress.metrics)

        # Build the profiler after the logger, so that their warnings are in this order.
        with _profiler(session, state, run_dir) or nullcontext() as state.profiler:
            logger = records.logger
            status = train(state, save=save, stop_requested=stop_requested, logger=logger)
            session.heartbeat.note(ENDING)  # the last checkpoint may take a while
            records.wait()
        state.engine.close(status)
        end = RunFields(step=state.step, epoch=state.batches.epoch)
        if status == Status.COMPLETED:
            end["weights_sha256"] = weights_sha256(state.module)
            export_best(state, run_dir, records, log=session.log)
        reason = stop_reason(state.progress, state.early_stop)
        if reason is not None and session.env.is_rank_zero:
            session.log(reason)
        end["stopped_early"] = reason
        logger.finish(status, **(end | state.measured))
    return status


def _limit(state: TrainState) -> tuple[str, int, int]:
    """Return the key that ends the training, the steps or epochs so far, and the key's value."""
    config = state.work.config.train
    if config.max_steps is None:
        return "train.epochs", state.batches.epoch_number, config.epochs
    return "train.max_steps", state.step, config.max_steps


def _changes(session: Session, state: TrainState) -> list[str]:
    """Return what this command changes in the run that it resumes. Collective: every rank.

    Raises:
        UserError: no steps are left, so a changed key would have no effect, yet `compare` would
            show the run's result under it; or the run is longer than the command asks for.
    """
    written = session.job.secrets.written(session.config)
    values = from_rank_zero(lambda: changed_values(written, session.run_dir))
    # Another option of a group changes many keys.
    groups = [key.removesuffix(".name") for key in values if re.fullmatch(r"\w+\.name", key)]
    shown = {group: values[f"{group}.name"] for group in groups}
    shown |= {key: pair for key, pair in values.items() if not is_inside(key, groups)}
    # Under torchrun the number of ranks may change without a key: a restart must not fail.
    of_ranks = {"world_size", "batch.global_size"} & set(chosen_keys(session.job.overrides))
    unused = [key for key in shown if is_inside(key, (*LEARNING, *of_ranks)) and key not in LENGTH]
    if unused and state.is_done:
        raise UserError(
            f"{session.run_dir} has already taken its {counted(state.step, 'step')}, so to change "
            f"{listed(unused)} would have no effect",
            "raise train.max_steps or train.epochs as well, or start a new run",
        )
    key, taken, limit = _limit(state)
    if taken > limit and any(key in shown for key in LENGTH):
        raise UserError(
            f"{session.run_dir} has already taken {counted(state.step, 'step')}, more than "
            f"{key}={limit}",
            "leave it out, or start a new run",
        )
    return [f"{key}={in_yaml(new)} (was {in_yaml(old)})" for key, (old, new) in shown.items()]


def _profiler(session: Session, state: TrainState, run_dir: RunDir) -> Profiler | None:
    """Return the profiler for ``train.profile``; None if it traces no step of this session."""
    setting, done, folder = session.config.train.profile, state.step, run_dir.path / "profile"

    def warn(text: str) -> None:
        session.log(f"warning: {text}")
        if session.env.is_rank_zero:
            add_warning(run_dir, text)

    if not has_steps_to_trace(setting, done=done, folder=folder, warn=warn):
        return None
    return Profiler(
        setting,
        done=done,
        device=session.devices[0],
        folder=folder,
        restart_timer=state.timer.forget,
        log=session.log,
        warn=warn,
    )


def training_facts(
    env: DistEnv, state: TrainState, parameters: Collection[nn.Parameter]
) -> dict[str, str]:
    """Return the facts of a training by name; `env` is rank 0's, `parameters` the whole model's."""
    config, dataset, batches = state.work.config, state.work.dataset, state.batches
    batch, num_shares, num_micro_steps = config.batch, batches.num_shares, batches.grad_accum_steps
    ranks = counted(num_shares, "rank" if num_shares == env.world_size else "trainer")
    shares = f"{batch.per_rank} a rank x {ranks}"
    if batch.virtual_ranks is not None:
        shares = f"{batch.per_rank} a part x {num_shares} virtual ranks"
    if (model_ranks := mode_needs(config.parallelism).model_ranks) != 1:
        groups = counted(num_shares, "group")
        shares = f"{batch.per_rank} a group x {groups} of {model_ranks or env.world_size} ranks"
    if num_micro_steps > 1:
        shares += f" x {num_micro_steps} micro-steps"
    total = sum(parameter.numel() for parameter in parameters)
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    trained = f" ({num_trained:,} trained)" if num_trained < total else ""
    last, size = state.final_step, batches.steps_per_epoch
    steps = counted(config.train.epochs, "epoch") if last is None else f"{last} in all"
    period = "an epoch ends with the stream" if size is None else f"{size} an epoch"
    counts = [count_of(split.num_samples) for split in (dataset.train, dataset.eval)]
    return {
        "model": f"{config.model.get('name')}, {total:,} parameters{trained}, "
        f"{config.train.precision}",
        "data": f"{dataset.name}, {' training and '.join(counts)} evaluation samples",
        **placement(config, env, state.work.devices),
        "batch": f"{batch.global_size} a step = {shares}",
        "steps": f"{steps}, {period}",
    }
