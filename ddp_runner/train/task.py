"""The training task of a rank: builds everything from the config, trains, and exports the model."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.scratch import READY, ended_ranks
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_logger import NullLogger, RunLogger, keep_files
from ddp_runner.tracking.run_record import write_run_record
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
    resume_step = restore(state, written, run_dir / "checkpoints", log=session.log)
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
        ended=partial(ended_ranks, session.job.scratch),
        log=session.log,
    )
    if role.serve is not None:  # this rank computes gradients for the ranks of the loop
        return role.serve(duties)
    if role.gradients is not None:
        state.gradients = role.gradients(duties)
    _mark_ready(session.job.scratch)

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


def _mark_ready(scratch: Path | None) -> None:
    """Tell the launcher that the training loop begins."""
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / READY).touch()


def _logger(
    session: Session, state: TrainState, trial: Trial, *, max_steps: int, resume_step: int | None
) -> NullLogger | RunLogger:
    """Return what this rank logs to, with the facts of the run logged already."""
    config, env, run_dir, position = session.config, session.env, session.run_dir, state.position
    if not env.is_rank_zero:
        return NullLogger()
    warnings = [*session.job.warnings, *warnings_of(trial, state, config)]
    write_run_record(run_dir, **sizes(state.module), warnings=warnings)
    keep_files(run_dir, state.setup.dataset.files)
    block = start_block(config, state, env, run_dir, max_steps=max_steps, code=session.job.code)
    notes = [*(f"warning: {text}" for text in warnings), *state.setup.dataset.notes]
    session.log("\n".join([*notes, block]))
    steps_left = max_steps - position.step + position.step_in_epoch
    return RunLogger(
        run_dir,
        started_at=session.job.started_at,
        max_steps=max_steps,
        total_epochs=position.epoch + math.ceil(steps_left / state.setup.batches.steps_per_epoch),
        resume_step=resume_step,
    )


def _writer(
    session: Session, *, resume_step: int | None
) -> AbstractContextManager[CheckpointWriter | None]:
    """Return the checkpoint writer on rank 0, None on the other ranks."""
    if not session.env.is_rank_zero:
        return nullcontext()
    writer = CheckpointWriter(
        session.run_dir / "checkpoints",
        session.config.checkpoint,
        scratch=session.job.scratch,
        log=session.log,
        pinned=session.devices[0].type == "cuda",
    )
    if resume_step is not None:
        writer.retain(step=resume_step)
    return writer


def start_block(
    config: Config,
    state: TrainState,
    env: DistEnv,
    run_dir: Path,
    *,
    max_steps: int,
    code: Mapping[str, Any],
) -> str:
    """Return the facts of a run, a line each, among them what the words mean for this very run."""
    batch, dataset = config.batch, state.setup.dataset
    place = ", ".join(str(device) for device in state.setup.devices)
    if state.setup.devices[0].type == "cuda":
        place += f" ({torch.cuda.get_device_name(state.setup.devices[0])})"
    num_shares = state.setup.batches.num_shares
    who = "ranks" if num_shares == env.world_size else "trainer(s)"
    shares = f"{batch.per_rank} a rank x {num_shares} {who}"
    if config.train.grad_accum_steps > 1:
        shares += f" x {config.train.grad_accum_steps} micro-steps"
    num_parameters = sum(parameter.numel() for parameter in state.module.parameters())
    rows = {
        "run": str(run_dir),
        "model": f"{config.model.get('name')}, {num_parameters:,} parameters, "
        f"{config.train.precision}",
        "dataset": f"{dataset.name}, {len(dataset.train.inputs):,} train, "
        f"{len(dataset.eval.inputs):,} eval samples",
        "parallelism": f"{config.parallelism.get('name')}, backend {config.backend.name} "
        f"(timeout {config.backend.timeout_s:g} s)",
        "world size": f"{env.world_size} ranks on {env.num_nodes} node(s): "
        f"{env.num_nodes} x {env.local_world_size} processes, "
        f"{torch.get_num_threads()} CPU thread(s) each",
        "rank": f"{_numbers(env.world_size)}, over all nodes; this is rank {env.rank}, process "
        f"{os.getpid()}, which logs and saves",
        "local rank": f"{_numbers(env.local_world_size)} within a node, where it chooses the "
        f"device; this is {env.local_rank}, on {place}",
        "node rank": f"{_numbers(env.num_nodes)}, a number for each machine; this is "
        f"{env.node_rank}",
        "batch": f"{batch.global_size} a step = {shares}",
        "steps": f"{max_steps} in all, {state.setup.batches.steps_per_epoch} an epoch",
        "versions": f"torch {code['versions']['torch']}, Python {code['versions']['python']}",
    }
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items())


def _numbers(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def sizes(module: nn.Module) -> dict[str, int]:
    """Return how many parameters a model has, and how many bytes its gradients."""
    parameters = list(module.parameters())
    return {
        "num_parameters": sum(one.numel() for one in parameters),
        "gradient_bytes": sum(one.nbytes for one in parameters if one.requires_grad),
    }
