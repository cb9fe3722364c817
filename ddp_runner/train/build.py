"""Builds what a rank trains from the groups of a resolved config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ddp_runner.checkpoint.weights import read_weights, starting_weights
from ddp_runner.config.instantiate import find, keywords, make, make_function
from ddp_runner.config.schema import Config, RunConfig, mode_needs
from ddp_runner.config.validate_ddp import validate_starts
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Dataset, Source, TensorSource
from ddp_runner.data.splits import MOST_GPU_DATA
from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import loop_group, share_group, sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metrics.metric import Metric
from ddp_runner.parallelism.initial_weights import build_by_modules
from ddp_runner.parallelism.mode import Mode
from ddp_runner.parallelism.shards import has_shards, send_module
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.rng import seed_rng
from ddp_runner.rank.session import Session
from ddp_runner.seeds import derive
from ddp_runner.train.build_batches import build_batches
from ddp_runner.train.build_schedule import build_schedule
from ddp_runner.train.ema import Ema
from ddp_runner.train.gradients import OwnGradients
from ddp_runner.train.optimizers import build_optimizer
from ddp_runner.train.parameters import freeze
from ddp_runner.train.state import Setup, TrainState
from ddp_runner.train.step import StepFunction
from ddp_runner.train.step_timer import StepTimer
from ddp_runner.train.stream_batches import StreamBatches


def build_session_state(session: Session, config: RunConfig) -> TrainState:
    """Load the data and build the state of a rank. Collective: every rank must call.

    Raises:
        UserError: see ``load_dataset``, ``starting_weights``, ``build_setup`` and ``build_state``.
    """
    dataset = build_dataset(config, log=session.log)
    weights = None
    if session.env.is_rank_zero:
        weights = starting_weights(config, session.run_dir.checkpoints, log=session.log)
    setup = build_setup(config, session.env, session.mode, devices=session.devices, dataset=dataset)
    return build_state(setup, weights=weights)


def build_setup(
    config: RunConfig,
    env: DistEnv,
    mode: Mode,
    *,
    devices: tuple[torch.device, ...],
    dataset: Dataset,
) -> Setup:
    """Return what stays the same while a rank trains. Collective: every rank must call.

    Raises:
        UserError: the dataset has fewer samples than there are ranks, or the loss, the training
            step or a metric cannot be built.
    """
    role = mode.role(env)
    group = loop_group(takes_part=role.loop is not None)
    train, evaluation = (
        split.near(devices[0], most_bytes=MOST_GPU_DATA) for split in (dataset.train, dataset.eval)
    )
    timer = StepTimer(devices[0])
    batches = build_batches(config, dataset, role, split=train, group=group, mark=timer.mark)
    if isinstance(batches, StreamBatches):
        notes = (*dataset.notes, *batches.split.notes(role.num_shares))
        dataset = replace(dataset, notes=notes)
    return Setup(
        config=config,
        mode=mode,
        role=role,
        env=role.loop or env,
        devices=devices,
        dataset=replace(dataset, eval=evaluation),
        batches=batches,
        eval_batch_size=config.batch.eval_size,
        step=build_step(config, devices),
        metrics=build_metrics(config),
        timer=timer,
        group=group,
        data_group=share_group(role.model_ranks, group=group),
    )


def build_metrics(config: RunConfig) -> dict[str, Metric]:
    """Return the configured metrics of evaluations by their names.

    Raises:
        UserError: a metric cannot be built.
    """
    return {
        name: make(f"metrics.{name}", keys, kind=Metric, allowed=config.allowed_targets)
        for name, keys in config.metrics.items()
    }


def build_dataset(config: Config, *, log: Callable[[str], None]) -> Dataset:
    """Return the config's dataset; see ``load_dataset``."""
    return load_dataset(build_source(config), data_root=Path(config.data_root), log=log)


def build_source(config: Config) -> Source | TensorSource:
    """Return what opens the config's dataset.

    Raises:
        UserError: it cannot be built.
    """
    found: Source | TensorSource = make(
        "dataset", config.dataset, kind=Source | TensorSource, allowed=config.allowed_targets
    )
    return found


def build_step(config: RunConfig, devices: Sequence[torch.device]) -> StepFunction:
    """Return the training step that ``train.step`` names.

    If it takes the keywords ``loss`` and ``count``, it gets the function that ``model.loss`` names
    and the value of ``batch.count``. A step or a loss that is a module moves to the devices, but is
    not trained.

    Raises:
        UserError: a name is not allowed or does not exist, or its keys do not fit.
    """
    allowed = config.allowed_targets
    torch.manual_seed(derive(config.seed, "step"))  # it may be a module with weights

    def loss() -> Any:
        own = make_function(config.model.get("loss"), key="model.loss", allowed=allowed)
        return own.to(devices[-1]) if isinstance(own, nn.Module) else own

    step = make_function(
        config.train.step,
        key="train.step",
        allowed=allowed,
        loss=loss,
        count=lambda: config.batch.count,
    )
    return step.to(devices[0]) if isinstance(step, nn.Module) else step


def build_state(setup: Setup, *, weights: Path | None = None) -> TrainState:
    """Build the model, the optimizer and its schedule. Collective: every rank must call.

    Only rank 0 reads a file of weights; the others get them from it.

    Raises:
        UserError: a group's keys do not fit the object that it names, or the model has nothing to
            train.
    """
    config = setup.config
    seed_rng(config.seed)  # the same weights on every rank and in every mode
    module = _build_module(setup, weights=weights)
    compiled = cast(nn.Module, torch.compile(module)) if config.train.compile else module
    model = setup.mode.wrap(compiled, setup.devices)
    # Each share drops other units.
    seed_rng(derive(config.seed, "dropout", setup.env.rank // setup.role.model_ranks))
    optimizer = build_optimizer(config, module)
    decay, ema = config.ema.decay, None
    if decay is not None and setup.role.loop is not None:  # the others take no optimizer steps
        ema = Ema(module, decay=decay)
    steps_per_epoch = setup.batches.steps_per_epoch
    total_steps = config.train.max_steps or (
        steps_per_epoch and config.train.epochs * steps_per_epoch
    )
    validate_starts(config, num_steps=total_steps)
    schedule = build_schedule(
        config, optimizer, total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    return TrainState(
        module=module,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scaler=torch.amp.GradScaler("cuda", enabled=config.train.precision == "fp16"),
        setup=setup,
        gradients=OwnGradients(),
        ema=ema,
    )


def model_factory(config: Config, arguments: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Return a function that builds the config's model; it takes the devices of its stages.

    Of the `arguments`, facts of the data, the model gets those that it takes.

    Raises:
        UserError: the model's target may not be named, or does not exist.
    """
    allowed = config.allowed_targets
    known = keywords(find(config.model.get("_target_"), key="model._target_", allowed=allowed))
    facts = {name: value for name, value in arguments.items() if name in known}
    build = partial(make, "model", config.model, kind=nn.Module, allowed=allowed, **facts)
    return partial(build_by_modules, build) if config.model.get("meta_init") else build


def alone(config: Config, device: torch.device) -> tuple[Mode, tuple[torch.device, ...]]:
    """Return how a process on its own places a model, all of it on one device."""
    num_devices = mode_needs(config.parallelism).devices_per_rank
    if num_devices == 1:
        return Single("single"), (device,)
    mode = make("parallelism", config.parallelism, kind=Mode, allowed=config.allowed_targets)
    return mode, (device,) * num_devices


def place_model(
    config: Config, mode: Mode, arguments: Mapping[str, Any], devices: Sequence[torch.device]
) -> nn.Module:
    """Return the bare model on its devices, in the memory format that the config asks for.

    Raises:
        UserError: see ``model_factory``.
    """
    module = mode.place(model_factory(config, arguments), devices)
    if config.model.get("channels_last") and not has_shards(module):  # these are contiguous
        module = module.to(memory_format=torch.channels_last)
    return module


def _load_weights(module: nn.Module, path: Path | None) -> None:
    """Load rank 0's file, if it has one, on all ranks: a mode need not send all that is in it."""
    (num_files,) = sum_over_ranks([path is not None])
    if num_files:
        send_module(module, read_weights(module, path) if path else None, group=None)


def _build_module(setup: Setup, *, weights: Path | None) -> nn.Module:
    """Return the bare model on its devices, with rank 0's weights loaded there."""
    keys = setup.config.model
    arguments = setup.dataset.model_arguments
    module = place_model(setup.config, setup.mode, arguments, setup.devices)
    freeze(module, setup.config.params.freeze)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"model={keys.get('name')} has no parameter that requires a gradient, so there is "
            "nothing to train; unfreeze some, or name another model"
        )
    if keys.get("weights") is not None:
        _load_weights(module, weights)
    return module
