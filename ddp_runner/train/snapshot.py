"""Saves everything that the next step depends on, and restores it."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ddp_runner.checkpoint.fetched import on_every_machine
from ddp_runner.checkpoint.plain_data import reject_sharded
from ddp_runner.checkpoint.store import latest_checkpoint, load_checkpoint
from ddp_runner.config.schema import RunConfig
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError, typed
from ddp_runner.parallelism.shards import first_not_finite, gathered, load_module, load_optimizer
from ddp_runner.train.first_batch import rehearse
from ddp_runner.train.snapshot_checks import identity, read_position, validate_same_run
from ddp_runner.train.state import Position, TrainState
from ddp_runner.train.stream_batches import StreamBatches

RATES = {"lr", "initial_lr", "max_lr", "min_lr"}  # that schedulers keep in the optimizer's groups


def snapshot(
    state: TrainState, config: RunConfig, *, copies: set[int] | None = None
) -> dict[str, Any]:
    """Return everything that the next step depends on. Collective: every rank must call.

    Args:
        state: of this rank.
        config: without secrets; see ``Secrets.written``.
        copies: takes the addresses of tensors that are copies already, as ``gathered``.

    Raises:
        UserError: a parameter is NaN or infinite, or a tensor is only this rank's shard and not
            a DTensor. Such a state is never saved.
    """
    if (name := first_not_finite(state.module.named_parameters())) is not None:
        raise UserError(
            f"parameter {name} became NaN or infinite by step {state.position.step}; it was "
            "not saved: start again with a smaller optimizer.lr, or resume from a checkpoint "
            "whose loss was still small"
        )
    content: dict[str, Any] = {
        "model": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict(),
    }
    if state.ema is not None:
        content["ema"] = state.ema.state_dict()
    content = gathered(content, keep=state.setup.env.is_rank_zero, copies=copies)
    reject_sharded(content)
    position = asdict(replace(state.position, outstanding=state.gradients.outstanding(state)))
    del position["metrics"]  # the manifest keeps them
    if isinstance(state.setup.batches, StreamBatches):  # where each rank is in its part
        content["stream"] = gather_objects(state.setup.batches.state, group=state.setup.group)
    return {
        **content,
        "scheduler": state.schedule.scheduler.state_dict(),
        "scaler": state.scaler.state_dict(),
        "position": position,
        "model_ranks": state.setup.role.model_ranks,
        **identity(config, state.setup.dataset),
    }


def restore(
    state: TrainState, config: RunConfig, folder: Path, *, log: Callable[[str], None]
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
    with on_every_machine(path) as found:
        content = load_checkpoint(found, is_mapped=True)  # a rank may need only its shards of it
        position = read_position(content, found)
    validate_same_run(content, position, state.setup, config, path)
    rehearse(state)
    try:
        _load(state, content, position, config)
    except Exception as error:  # torch raises anything for a foreign state
        reason = typed(error)
        raise UserError(f"checkpoint {path} does not fit this model: {reason}") from error
    state.position = position
    if isinstance(state.setup.batches, StreamBatches):
        if position.step_in_epoch:
            own = content["stream"][state.setup.env.rank]
            state.setup = replace(state.setup, batches=replace(state.setup.batches, resumed=own))
    else:
        # The loop begins with the batches that an asynchronous run never applied.
        instead = dict(enumerate(position.outstanding, start=state.next_batch))
        batches = replace(state.setup.batches, instead=instead)
        state.setup = replace(state.setup, batches=batches)
    log(f"resumed from {path}, step {position.step}")
    return position.step


def _load(
    state: TrainState,
    content: dict[str, Any],
    position: Position,
    config: RunConfig,
) -> None:
    """Load the model, optimizer, schedule and scaler of a checkpoint."""
    load_module(state.module, content["model"])
    _load_optimizer(state, content, position, config)
    if state.ema is not None:
        state.ema.load_state_dict(content["ema"])
    if content["scaler"]:  # empty if the run's precision scaled no loss
        state.scaler.load_state_dict(content["scaler"])


def _load_optimizer(
    state: TrainState, content: dict[str, Any], position: Position, config: RunConfig
) -> None:
    """Load the optimizer and the schedule, but keep the settings of this run's config.

    So a diverged run can be resumed with a smaller optimizer.lr. If a schedule's rates are part of
    its state, they are scaled by the ratio of the configured rates. What the optimizer keeps in
    its groups besides its settings is loaded: some optimizers count their steps there.
    """
    optimizer, scheduler = state.optimizer, state.schedule.scheduler
    of_groups = [key for group in config.params.groups for key in group]
    saved, settings = content["scheduler"], {*config.optimizer, *of_groups, "initial_lr"}
    chosen = [
        {key: value for key, value in group.items() if key in settings}
        for group in optimizer.param_groups
    ]
    load_optimizer(optimizer, content["optimizer"])
    if not isinstance(scheduler, LambdaLR):  # its saved rates are part of its state
        scheduler.load_state_dict(saved)
        for index, (group, own) in enumerate(zip(optimizer.param_groups, chosen, strict=True)):
            ratio = own["initial_lr"] / group["initial_lr"]
            for key in RATES & group.keys():
                group[key] *= ratio
            # SequentialLR and ChainedScheduler hold others.
            for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
                if hasattr(one, "base_lrs"):
                    one.base_lrs[index] *= ratio
        return
    scheduler.last_epoch, scheduler._step_count = saved["last_epoch"], saved["_step_count"]
    has_other_size = content["made_of"].get("batch.global_size") != config.batch.global_size
    steps_per_epoch = state.setup.batches.steps_per_epoch
    if has_other_size and config.train.max_steps is None and steps_per_epoch is not None:
        # The run is measured in epochs, so our schedules continue as if all epochs had had
        # batches of this size.
        scheduler.last_epoch = position.epoch * steps_per_epoch
    for group, own, factor in zip(
        optimizer.param_groups, chosen, scheduler.lr_lambdas, strict=True
    ):
        group.update(own)
        group["lr"] = own["initial_lr"] * factor(scheduler.last_epoch)
