"""Saves everything that the next step depends on, and restores it."""

from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.plain_data import refuse_sharded
from ddp_runner.checkpoint.store import latest_checkpoint, load_checkpoint
from ddp_runner.config.moved import present_name
from ddp_runner.config.schema import Config
from ddp_runner.data.batches import ORDER_VERSION
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError
from ddp_runner.rank.cuda import rng_states, set_rng_states
from ddp_runner.train.rehearsal import rehearse
from ddp_runner.train.snapshot_checks import data_facts, read_position, validate_same_data
from ddp_runner.train.state import Position, TrainState


def snapshot(state: TrainState, config: Config) -> dict[str, Any]:
    """Return everything that the next step depends on. Collective: every rank must call.

    Args:
        state: of this rank.
        config: without secrets; see ``Secrets.written``.

    Raises:
        UserError: a parameter is NaN or infinite, or a tensor is only this rank's shard. Such
            a state is never saved.
    """
    tensors = {"model": state.module.state_dict(), "optimizer": state.optimizer.state_dict()}
    refuse_sharded(tensors)
    validate_finite(state)
    return {
        **tensors,
        "scheduler": state.scheduler.state_dict(),
        "scaler": state.scaler.state_dict(),
        "position": _saved_position(state),
        "order_version": ORDER_VERSION,
        "rng": gather_objects(_rng_state(state.setup.devices[0]), group=state.setup.group),
        "made_of": _made_of(config),
        "data": data_facts(state.setup.dataset),
    }


def restore(
    state: TrainState,
    config: Config,
    folder: Path,
    *,
    log: Callable[[str], None],
) -> int | None:
    """Load the newest valid checkpoint of a folder into the state, if there is one.

    Every rank loads onto its own devices. Collective: every rank must call.

    Returns:
        The step that the run continues from; None if it starts at step 0.

    Raises:
        UserError: the checkpoint belongs to another model, optimizer or dataset, or every
            checkpoint is damaged. All ranks raise the same error.
    """
    path = from_rank_zero(lambda: latest_checkpoint(folder, log=log))
    if path is None:
        if config.resume is not None:
            log(f"{folder} holds no checkpoint: the run begins at step 0")
        return None
    # On the CPU: load_state_dict copies each tensor to its own device, and leaves Adam's step
    # counts on the CPU, where a step reads them without waiting for a GPU.
    content = load_checkpoint(path)
    saved = read_position(content, path)
    steps_per_epoch = state.setup.batches.steps_per_epoch
    # A loss may have moved to another module since.
    made_of = {key: present_name(value) for key, value in content["made_of"].items()}
    current = _made_of(config)
    changed = [key for key, value in current.items() if made_of.get(key) != value]
    at_epoch_end = saved.step_in_epoch == 0 and not saved.outstanding
    schedule_step = None
    if at_epoch_end and "batch.global_size" in changed:
        changed.remove("batch.global_size")  # it may change between epochs
        if config.train.max_steps is None:
            # The run is measured in epochs, so our schedules continue as if all epochs had had
            # batches of this size.
            schedule_step = saved.epoch * steps_per_epoch
    if changed:
        raise UserError(
            f"checkpoint {path} was made with "
            + ", ".join(f"{key}={made_of.get(key)}" for key in changed)
            + ", this run has "
            + ", ".join(f"{key}={current[key]}" for key in changed)
            + "; leave these keys as they were"
        )
    _validate_order(content, saved, path, steps_per_epoch=steps_per_epoch)
    validate_same_data(content.get("data"), state.setup.dataset, path)
    rehearse(state)
    try:
        _load(state, content, config, schedule_step=schedule_step, log=log)
    except Exception as error:  # torch raises anything for a foreign state
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"checkpoint {path} does not fit this model: {reason}") from error
    metrics = read_manifest(path).metrics
    saved.metrics.update({name: value for name, value in metrics.items() if value is not None})
    state.position = saved
    _put_outstanding_first(state)
    log(f"resumed from {path}, step {saved.step}")
    return saved.step


def _load(
    state: TrainState,
    content: dict[str, Any],
    config: Config,
    *,
    schedule_step: int | None,
    log: Callable[[str], None],
) -> None:
    """Load the model, optimizer, schedule, scaler and random numbers of a checkpoint."""
    state.module.load_state_dict(content["model"])
    _restore_optimizer(state, content, keys=config.optimizer, schedule_step=schedule_step)
    if content["scaler"]:  # empty if the run's precision scaled no loss
        state.scaler.load_state_dict(content["scaler"])
    if len(content["rng"]) == state.setup.env.world_size:
        _set_rng_state(content["rng"][state.setup.env.rank], state.setup.devices[0])
    elif state.setup.env.is_rank_zero:
        log("the world size differs from the checkpoint's: dropout draws new random numbers")


def _validate_order(
    content: dict[str, Any], saved: Position, path: Path, *, steps_per_epoch: int
) -> None:
    """Raise if the run cannot continue at the saved place of the epoch's order."""
    if saved.step_in_epoch > steps_per_epoch:
        raise UserError(
            f"checkpoint {path} stands at step {saved.step_in_epoch} of an epoch that has "
            f"{steps_per_epoch}; use a checkpoint that this program wrote"
        )
    is_amid_epoch = saved.step_in_epoch > 0 or bool(saved.outstanding)
    if is_amid_epoch and content.get("order_version", 1) != ORDER_VERSION:
        raise UserError(
            f"checkpoint {path} was saved amid epoch {saved.epoch + 1} by a version of ddp_runner "
            "that puts the samples in another order, so that some would be used twice and others "
            "never; finish the epoch with that version, or resume from a checkpoint between epochs"
        )


def _saved_position(state: TrainState) -> dict[str, Any]:
    """Return the position without its metrics, which the manifest keeps."""
    position = replace(state.position, outstanding=state.gradients.outstanding(state))
    return {name: value for name, value in asdict(position).items() if name != "metrics"}


def _put_outstanding_first(state: TrainState) -> None:
    """Make the loop begin with the batches that an asynchronous run never applied."""
    position, batches = state.position, state.setup.batches
    first = position.epoch * batches.steps_per_epoch + position.step_in_epoch
    instead = dict(enumerate(position.outstanding, start=first))
    state.setup = replace(state.setup, batches=replace(batches, instead=instead))


def _restore_optimizer(
    state: TrainState, content: dict[str, Any], *, keys: Collection[str], schedule_step: int | None
) -> None:
    """Restore the optimizer and the schedule, but keep the settings of this run's config.

    So a diverged run can be resumed with a smaller optimizer.lr. What the optimizer keeps in its
    groups besides its settings is restored: some optimizers count their steps there.

    Args:
        state: of this rank.
        content: of the checkpoint.
        keys: of the config's optimizer group.
        schedule_step: the step at which our schedules continue; None for the saved one.
    """
    optimizer, scheduler = state.optimizer, state.scheduler.scheduler
    chosen = [
        {k: v for k, v in group.items() if k in (*keys, "initial_lr")}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(content["optimizer"])
    if not isinstance(scheduler, LambdaLR):  # its saved rates are part of its state
        initial_rates = [settings["initial_lr"] for settings in chosen]
        state.scheduler.load_state_dict(content["scheduler"], initial_rates=initial_rates)
        return
    saved_step = content["scheduler"]["last_epoch"]
    scheduler.last_epoch = saved_step if schedule_step is None else schedule_step
    scheduler._step_count = content["scheduler"]["_step_count"]
    for group, own, factor in zip(
        optimizer.param_groups, chosen, scheduler.lr_lambdas, strict=True
    ):
        group.update(own)
        group["lr"] = own["initial_lr"] * factor(scheduler.last_epoch)


def validate_finite(state: TrainState) -> None:
    """Validate that all parameters are finite. They are equal on all ranks, so all ranks raise.

    Raises:
        UserError: a parameter is NaN or infinite.
    """
    for name, parameter in state.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                f"parameter {name} became NaN or infinite by step {state.position.step}; it was "
                "not saved: start again with a smaller optimizer.lr, or resume from a checkpoint "
                "whose loss was still small"
            )


def _made_of(config: Config) -> dict[str, Any]:
    """Return the keys that a resumed run must keep, with their values."""
    groups = {
        f"{group}.{key}": value
        for group, keys in (("model", config.model), ("dataset", config.dataset))
        for key, value in keys.items()
        if isinstance(value, str | int | float | bool) and not key.startswith("_")
    }
    # A model and its _mp form have the same parameters, so each can resume the other.
    groups.pop("model.num_stages", None)
    groups.pop("model.weights", None)  # only read at step 0
    made_of = {
        **groups,
        "model.name": str(config.model.get("name")).removesuffix("_mp"),
        "optimizer.name": config.optimizer.get("name"),
        "scheduler.name": config.scheduler.get("name"),
        "seed": config.seed,
        "batch.global_size": config.batch.global_size,
    }
    # Values from the environment are not saved; they may differ when a run is resumed.
    return {key: value for key, value in made_of.items() if "${" not in str(value)}


def _rng_state(device: torch.device) -> dict[str, Any]:
    content: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        content["cuda"] = rng_states(device)
    return content


def _set_rng_state(content: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(content["cpu"])
    if "cuda" in content and device.type == "cuda":
        saved = content["cuda"]  # earlier versions saved only the first device's
        set_rng_states([saved] if isinstance(saved, torch.Tensor) else saved, device)
