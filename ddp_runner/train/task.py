"""The training task of one rank: the config becomes objects, the objects a run."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_runner.checkpoint.weights import starting_weights
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Source
from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.tracking.claims import freeze
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import NullLogger, RunLogger, keep_files
from ddp_runner.tracking.run_record import RunFields, write_run_record
from ddp_runner.train.build import build_trainee
from ddp_runner.train.export import deliver, validate_monitor
from ddp_runner.train.first_batch import refuse_mean, try_first_batch, warnings_of
from ddp_runner.train.loop import Control, Position, train
from ddp_runner.train.roles import take_part
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.step import Trainee
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
        weights = starting_weights(config, run_dir.checkpoints, log=log)
    trainee = build_trainee(
        config, env, mode=session.mode, devices=session.devices, dataset=dataset, weights=weights
    )
    trial = try_first_batch(trainee, config)
    refuse_mean(trial, config)
    position = Position()
    resume_step = restore(trainee, position, written, run_dir.checkpoints, log=log)
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
        ended=session.job.scratch.ended_ranks if session.job.scratch else set,
        log=log,
    )
    if isinstance(part, str):
        return part
    trainee = part
    if session.job.scratch is not None:
        session.job.scratch.begin_loop()

    logger: NullLogger | RunLogger = NullLogger()
    if env.is_rank_zero:
        write_run_record(run_dir, **sizes(trainee.module))
        found = [*session.job.warnings, *warnings_of(trial, trainee, config)]
        write_run_record(run_dir, warnings=found)
        warnings = [f"warning: {one}" for one in found]
        block = start_block(
            config, trainee, env, run_dir, max_steps=max_steps, code=session.job.code
        )
        keep_files(run_dir.path, dataset.files)
        log("\n".join([*warnings, *dataset.notes, block]))
        logger = RunLogger(
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
            run_dir.checkpoints,
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


def start_block(
    config: Config,
    trainee: Trainee,
    env: DistEnv,
    run_dir: RunDir,
    *,
    max_steps: int,
    code: Mapping[str, Any],
) -> str:
    """Return the facts of a run, a line each, among them what the words mean for this very run."""
    batch, dataset = config.batch, trainee.dataset
    place = ", ".join(str(device) for device in trainee.devices)
    if trainee.devices[0].type == "cuda":
        place += f" ({torch.cuda.get_device_name(trainee.devices[0])})"
    num_shares = trainee.batches.num_shares
    who = "ranks" if num_shares == env.world_size else "trainer(s)"
    shares = f"{batch.per_rank} a rank x {num_shares} {who}"
    if config.train.grad_accum_steps > 1:
        shares += f" x {config.train.grad_accum_steps} micro-steps"
    num_parameters = sum(parameter.numel() for parameter in trainee.module.parameters())
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
        "steps": f"{max_steps} in all, {trainee.batches.steps_per_epoch} an epoch",
        "versions": f"torch {code['versions']['torch']}, Python {code['versions']['python']}",
    }
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items())


def _numbers(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def sizes(module: nn.Module) -> RunFields:
    """Return how many parameters a model has, and how many bytes its gradients."""
    parameters = list(module.parameters())
    return {
        "num_parameters": sum(one.numel() for one in parameters),
        "gradient_bytes": sum(one.nbytes for one in parameters if one.requires_grad),
    }
