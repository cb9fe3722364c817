"""Builds a rank's train state from the groups of a resolved config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.checkpoint.weights import Weights, starting_weights
from ddp_runner.config.instantiate import make, make_function
from ddp_runner.config.rules import validate_num_samples
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.training import TrainConfig
from ddp_runner.data.batches import Batches, NumberedBatches
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import build_dataset
from ddp_runner.data.splits import AbsentSplit, NumberedSplit
from ddp_runner.data.stream import Split, StreamBatches, StreamSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import loop_group, share_group
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.metrics.metric import Metric
from ddp_runner.parallelism.mode import Mode
from ddp_runner.rank.session import Session
from ddp_runner.seeds import seed_all
from ddp_runner.train.build_model import build_module, place_model
from ddp_runner.train.ema import Ema
from ddp_runner.train.loop import LocalEngine
from ddp_runner.train.optimizers import build_optimizer
from ddp_runner.train.schedules import build_schedule
from ddp_runner.train.snapshot import saved_objects
from ddp_runner.train.state import TrainState, Work
from ddp_runner.train.step import StepFunction
from ddp_runner.train.step_timer import StepTimer


def build_session_state(session: Session, config: RunConfig) -> TrainState:
    """Load the data and build the state of a rank. Collective: every rank must call."""
    dataset = build_dataset(config, log=session.log)
    weights = None
    if session.env.is_rank_zero:
        weights = starting_weights(config, session.run_dir.checkpoints, log=session.log)
    work = build_work(config, session.env, session.mode, devices=session.devices, dataset=dataset)
    return build_state(work, weights=weights)


def build_work(
    config: RunConfig,
    env: DistEnv,
    mode: Mode,
    *,
    devices: tuple[torch.device, ...],
    dataset: Dataset,
) -> Work:
    """Return a rank's fixed part of the run. Collective: every rank must call.

    Raises:
        UserError: the loss, the training step or a metric cannot be built.
    """
    layout = mode.layout(env)
    group = loop_group(takes_part=layout.runs_loop)
    return Work(
        config=config,
        mode=mode,
        layout=layout,
        devices=devices,
        dataset=dataset,
        step_fn=build_step(config, devices),
        metrics={
            name: make(f"metrics.{name}", keys, kind=Metric, allowed=config.allowed_targets)
            for name, keys in config.metrics.items()
        },
        group=group,
        data_group=share_group(layout.model_ranks, group=group),
    )


def build_batches(work: Work, *, split: Split, mark: Callable[[StepPart], None]) -> Batches:
    """Return a rank's share of the training batches; `mark` times the waits of a stream.

    Raises:
        UserError: there are fewer samples than ranks, or the mode cannot use a stream.
    """
    config, layout, dataset = work.config, work.layout, work.dataset
    common: dict[str, Any] = {
        "global_size": config.batch.global_size,
        "grad_accum_steps": config.train.grad_accum_steps,
        "share": layout.share,
        "num_shares": layout.num_shares,
        "seed": config.seed,
    }
    if isinstance(split, StreamSplit):
        if config.batch.virtual_ranks is not None:
            raise UserError(
                f"batch.virtual_ranks cuts each global batch by numbers, and "
                f"dataset={dataset.name} is a stream without numbers",
                "leave it out, or use a dataset with __len__",
            )
        if layout.sends_batch_numbers:
            raise UserError(
                f"parallelism={config.parallelism.get('name')} gives out batches by number, and "
                f"dataset={dataset.name} is a stream without numbers",
                "write parallelism=ddp",
            )
        return StreamBatches(split=split, group=work.data_group, mark=mark, **common)
    assert isinstance(split, NumberedSplit)
    virtual = config.batch.virtual_ranks
    validate_num_samples(dataset.name, len(split), ranks=layout.num_shares, virtual=virtual)
    return NumberedBatches(
        split=split,
        shares_per_rank=layout.shares_per_rank,
        is_computed=layout.computes_batches,
        num_randoms=0 if dataset.augmentation is None else dataset.augmentation.num_randoms,
        shuffle=config.dataset.get("shuffle", True),
        lengths=dataset.lengths() if dataset.group_by_length else None,
        **common,
    )


def build_step(config: RunConfig, devices: Sequence[torch.device]) -> StepFunction:
    """Return the training step that ``train.step`` names.

    If it has the keywords ``loss`` and ``count``, it gets the function that ``model.loss`` names
    and the value of ``batch.count``. A step or a loss that is a module moves to the devices, but is
    not trained.

    Raises:
        UserError: a name is not allowed or does not exist, or its keys do not fit.
    """
    allowed, target = config.allowed_targets, config.train.step
    seed_all(config.seed, "step module")  # the step or the loss may have weights

    def build_loss() -> Any:
        loss = make_function(config.model.get("loss"), key="model.loss", allowed=allowed)
        return loss.to(devices[-1]) if isinstance(loss, nn.Module) else loss

    keys = target if isinstance(target, Mapping) else {"_target_": target}
    if config.task == "predict" and keys["_target_"] == TrainConfig().step:
        target = {"_target_": "ddp_runner.train.step.predicted", "targets": keys.get("targets")}
    step = make_function(
        target, key="train.step", allowed=allowed, loss=build_loss, count=lambda: config.batch.count
    )
    return step.to(devices[0]) if isinstance(step, nn.Module) else step


def build_state(work: Work, *, weights: Weights | None = None) -> TrainState:
    """Build the batches, the model, the optimizer and its schedule. Collective: every rank.

    Only rank 0 passes `weights`, and sends them to the other ranks.

    Raises:
        UserError: a group's keys do not fit its object, the dataset does not fit the run, or the
            model has nothing to train.
    """
    config, dataset, device = work.config, work.dataset, work.devices[0]
    evaluates = config.train.eval_every_epochs or config.train.eval_every_steps
    if isinstance(dataset.eval, AbsentSplit) and (evaluates or config.checkpoint.load_best):
        raise UserError(f"{dataset.eval.fix}, or never evaluate: train.eval_every_epochs=0")
    train, evaluation = (dataset.near(split, device) for split in (dataset.train, dataset.eval))
    notes = dataset.notes
    if isinstance(train, StreamSplit):
        notes += train.notes(work.layout.num_shares)
    work = replace(work, dataset=replace(dataset, train=train, eval=evaluation, notes=notes))
    timer = StepTimer(device)
    batches = build_batches(work, split=train, mark=timer.mark)
    seed_all(config.seed)  # the same weights on every rank and in every mode
    module = build_module(work, weights=weights)
    compiled = cast(nn.Module, torch.compile(module)) if config.train.compile else module
    model = work.mode.wrap(compiled, work.devices)
    optimizer = build_optimizer(config, module)
    decay, ema = config.ema.decay, None
    if decay is not None and work.layout.runs_loop:  # only these ranks take optimizer steps
        build = partial(place_model, config, work.mode, dataset.model_arguments, work.devices)
        ema = Ema(module, decay=decay, build=build)
    steps_per_epoch = batches.steps_per_epoch
    total_steps = config.train.max_steps or (
        steps_per_epoch and config.train.epochs * steps_per_epoch
    )
    schedule = build_schedule(
        config, optimizer, total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    state = TrainState(
        work=work,
        module=module,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scaler=torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16"),
        batches=batches,
        engine=LocalEngine(),
        timer=timer,
        ema=ema,
    )
    state.settings = settings_of(saved_objects(state))
    return state
